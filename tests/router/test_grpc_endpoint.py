"""The servers behind a router's gRPC port."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from cluster.config.router import RouterConfig
from cluster.errors import ConfigError
from router import listening
from router.grpc_endpoint import GrpcEndpoint
from router.listening import ADDRESS_SHARES, own_listeners


@contextlib.asynccontextmanager
async def started(port: int = 0, processes: int = 1) -> AsyncIterator[int]:
    config = RouterConfig(model=Path("m"), grpc_port=port, processes=processes)
    endpoint = GrpcEndpoint(config, MagicMock(), None, ask_clients=False)
    await endpoint.start()
    try:
        yield int(endpoint.address.rpartition(":")[2])
    finally:
        await endpoint.stop(0)


def listeners(port: int) -> int:
    found = own_listeners(port)
    for one in found:
        one.close()
    return len(found)


async def test_each_share_of_addresses_has_a_server() -> None:
    async with started() as port:
        assert listeners(port) == ADDRESS_SHARES
    assert listeners(port) == 0


async def test_processes_that_share_the_port_have_one_server_each() -> None:
    async with started(processes=2) as port:
        assert listeners(port) == 1


async def test_another_router_does_not_share_the_port() -> None:
    async with started() as port:
        with pytest.raises(ConfigError, match=f"--grpc-port {port}"):
            async with started(port):
                pass


async def test_a_system_that_does_not_spread_addresses_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening, "_attach", MagicMock(side_effect=OSError("not supported")))
    async with started():
        assert "at the gRPC port may delay requests from all others: not supported" in caplog.text
