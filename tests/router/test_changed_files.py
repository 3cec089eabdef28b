"""Files of keys and certificates that are read again take none of the router's own time."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from cluster.config.router import RouterConfig
from cluster.security.key_file import ApiKeys
from router import server
from tests.harness.waiting import until


async def test_a_file_that_is_read_slowly_does_not_keep_a_router_from_reporting(
    router_model: Path, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of many tenants take seconds to parse: other processes, and the probes, would take the router for hung."""
    reading, may_end = threading.Event(), threading.Event()
    beats: list[bool] = []

    def read_slowly(keys: ApiKeys) -> None:
        reading.set()
        may_end.wait(30.0)

    monkeypatch.setattr(ApiKeys, "refresh", read_slowly)
    monkeypatch.setattr(server, "return_long_blocks", lambda: None)
    for name in ("freeze", "set_threshold"):  # of the whole process, in which other tests run
        monkeypatch.setattr(gc, name, lambda *thresholds: None)
    ports: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "drain_delay_seconds": 0, "drain_seconds": 0}
    config = RouterConfig(model=router_model, redis_url=redis_url, namespace=namespace, secret="s", **ports)
    router = server.Router(config)
    monkeypatch.setattr(router.gateway, "beat", lambda: beats.append(reading.is_set()))
    await router.start()
    try:
        await until(lambda: beats[-2:] == [True, True], "the router reports while a file is being read")
    finally:
        may_end.set()
        await router.close()
