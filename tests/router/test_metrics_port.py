"""The endpoints for kubelets and Prometheus, on a port without keys and certificates."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import httpx

from baton.local.certs import make_certs
from baton.processes.ports import free_ports
from tests.harness.router import KeyFile, run_router, stub_workers
from tests.harness.waiting import wait_for


def test_probes_and_metrics_need_no_key_and_no_certificate(
    redis_url: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    make_certs(tmp_path, ["127.0.0.1"], 2)
    keys = KeyFile(tmp_path / "keys.yaml")
    namespace = f"test-{secrets.token_hex(4)}"
    config = {
        "model": str(checkpoint("llama")),
        "redis_url": redis_url,
        "namespace": namespace,
        "metrics_port": port,
        "api_keys_file": str(keys.path),
        "tls_cert": str(tmp_path / "router.pem"),
        "tls_key": str(tmp_path / "router.key"),
        "tls_ca": str(tmp_path / "ca.pem"),
        "tls_client_ca": str(tmp_path / "client-ca.pem"),
    }
    url = f"http://127.0.0.1:{port}"
    with run_router(tmp_path, config):
        assert httpx.get(f"{url}/live").status_code == 200
        alone = httpx.get(f"{url}/ready")
        assert alone.status_code == 503
        assert alone.json()["why"] == ["no decode worker is available"]
        assert "baton_requests_in_flight 0.0" in httpx.get(f"{url}/metrics").text
        with stub_workers(redis_url, namespace):
            wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200, 60, "ready")
