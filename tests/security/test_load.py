"""The load generator against secured endpoints: with a key, over TLS."""

from __future__ import annotations

import json
import secrets

import httpx
import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.client import ClientTls
from baton.local.certs import make_certs
from tests.harness.router import KeyFile, run_router, stub_workers
from tests.harness.waiting import wait_for


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_load_with_a_key_over_tls(protocol, checkpoint, redis_server, tmp_path):
    make_certs(tmp_path / "certs", [], 2)
    keys = KeyFile(tmp_path / "keys.yaml")
    key = keys.add("load")
    namespace = f"test-{secrets.token_hex(4)}"
    ca = tmp_path / "certs" / "ca.pem"
    config = {
        "model": str(checkpoint("llama")),
        "redis_url": redis_server.url,
        "namespace": namespace,
        "api_keys_file": str(keys.path),
        "tls_cert": str(tmp_path / "certs" / "router.pem"),
        "tls_key": str(tmp_path / "certs" / "router.key"),
    }
    with stub_workers(redis_server.url, namespace), run_router(tmp_path / "router", config) as router:
        context = ClientTls(ca).context()
        wait_for(lambda: httpx.get(f"{router.http}/ready", verify=context).status_code == 200, 60, "ready")
        target = router.http if protocol == "http" else router.grpc
        report = tmp_path / "report.json"
        arguments = [
            "load",
            "--protocol",
            protocol,
            "--target",
            target,
            "--requests",
            "4",
            "--concurrency",
            "2",
        ]
        arguments += ["--tls-ca", str(ca), "--prompt-tokens", "8", "--max-tokens", "4", "--json", str(report)]
        result = CliRunner().invoke(app, [*arguments, "--api-key", key])
        assert result.exit_code == 0, result.output
        assert key not in report.read_text() + result.output
        assert json.loads(report.read_text())
        assert CliRunner().invoke(app, [*arguments, "--api-key", "wrong"]).exit_code == 2
