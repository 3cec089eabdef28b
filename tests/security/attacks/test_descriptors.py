"""Connections that would use up a router's file descriptors."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil

from cluster.config.router import RouterConfig
from router.admission.descriptors import fitted
from tests.harness import router_process as router_setup
from tests.harness.waiting import wait_for
from tests.security.attacks.grpc_frames import address, has_ended, hold


def test_connection_limits_fit_the_descriptors() -> None:
    config = RouterConfig(model=Path("/none"), max_http_connections=4096, max_grpc_connections=1024)
    assert fitted(config, 20_000) is config
    few = fitted(config, 260)
    assert (few.max_http_connections, few.max_grpc_connections) == (28, 7)
    assert fitted(config, 2).max_grpc_connections == 1


def test_with_few_descriptors_no_port_takes_them_from_the_other(
    checkpoint: Any, redis_server: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -n 300\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    config = {
        "model": str(checkpoint("llama")),
        "redis_url": redis_server.url,
        "namespace": "few-descriptors",
    }
    monkeypatch.setattr(sys, "executable", str(python))
    with router_setup.run_router(tmp_path / "router", config) as router, contextlib.ExitStack() as stack:
        held = [*hold(stack, address(router), 320), *hold(stack, router.address, 320)]
        # So many have no place: every one has been accepted once these are closed
        wait_for(lambda: sum(map(has_ended, held)) > 640 - 300, 30, "those without a place are closed")
        assert psutil.Process(router.pid).num_fds() < 300
        assert httpx.get(f"{router.http}/health", timeout=10).status_code == 200
        said = router.log.read_text()
        assert "too few for the connection limits" in said and "Too many open files" not in said
