"""How processes reach the API server."""

from __future__ import annotations

from pathlib import Path

import pytest
from kubernetes import client
from kubernetes.config import incluster_config

from baton.local.certs import make_certs
from cluster.kubernetes.api import open_api
from tests.kubernetes.api.server import ApiServer

NOBODY = "http://127.0.0.1:1"


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in the environment, as pods have one to fetch a model."""
    for name in ("https_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", NOBODY)


@pytest.mark.usefixtures("proxied")
def test_no_proxy_comes_between_a_pod_and_its_api_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certs(tmp_path, ["127.0.0.1"], 1)
    (tmp_path / "token").write_text("token")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.pem"))
    with ApiServer(certificates=tmp_path) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        with open_api(None) as api:
            assert client.VersionApi(api).get_code(_request_timeout=10).git_version


@pytest.mark.usefixtures("proxied")
def test_a_user_who_reaches_a_cluster_by_a_proxy_still_does(tmp_path: Path) -> None:
    """As kubectl does."""
    server = ApiServer(certificates=tmp_path)
    make_certs(tmp_path, ["127.0.0.1"], 1)
    with server, open_api(server.kubeconfig(tmp_path / "kubeconfig")) as api:
        assert api.configuration.proxy == NOBODY
