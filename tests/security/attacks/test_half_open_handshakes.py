"""Clients that connect to the router's gRPC port and do not finish the TLS handshake take no place of clients of
other shares of addresses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config.router import RouterConfig
from cluster.security.identity import Identity
from cluster.security.tls import ClientTls, router_channel_async
from router.grpc_endpoint import GrpcEndpoint

LIMIT = 32
HANDSHAKE_SECONDS = 10.0
PATIENCE = 5.0  # of a new client; a place was free after HANDSHAKE_SECONDS
HELD = 200
STRANGER = "127.0.0.2"  # of another share than 127.0.0.1


def client_hello() -> bytes:
    context = ssl.create_default_context()
    sent = ssl.MemoryBIO()
    handshake = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        handshake.do_handshake()
    return sent.read()


BEGUN = {"nothing": b"", "half a hello": client_hello()[:40], "a hello": client_hello()}


@pytest.fixture
def seconds() -> float:
    return HANDSHAKE_SECONDS


@pytest.fixture
async def endpoint(certs: Path, seconds: float) -> AsyncIterator[GrpcEndpoint]:
    ours = certs / "ours"
    identity = Identity(ours / "router.pem", ours / "router.key", None)
    config = RouterConfig(
        model=Path("m"), grpc_port=0, max_grpc_connections=LIMIT, header_seconds=seconds, grpc_idle_seconds=30
    )
    made = GrpcEndpoint(config, MagicMock(), identity, ask_clients=False)
    await made.start()
    made.show_ready(True)
    yield made
    await made.stop(0)


def channel(endpoint: GrpcEndpoint, certs: Path) -> grpc.aio.Channel:
    tls = ClientTls(certs / "ours" / "ca.pem")
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", "localhost")]
    return router_channel_async(endpoint.address, tls, options)


async def checked(channel: grpc.aio.Channel, seconds: float) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    call: Any = stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds, wait_for_ready=True)
    return int((await call).status)


def hold(stack: contextlib.ExitStack, endpoint: GrpcEndpoint, begun: bytes) -> socket.socket:
    host, _, port = endpoint.address.rpartition(":")
    where = (host, int(port))
    sock = stack.enter_context(socket.create_connection(where, timeout=5, source_address=(STRANGER, 0)))
    with contextlib.suppress(OSError):
        sock.sendall(begun)
    return sock


@pytest.mark.long
@pytest.mark.parametrize("begun", BEGUN)
async def test_handshakes_that_do_not_end_take_no_place(
    endpoint: GrpcEndpoint, certs: Path, begun: str
) -> None:
    """They held all places for the handshake's time: a new client was closed at once."""
    async with channel(endpoint, certs) as before:
        assert await checked(before, 20) == health_pb2.HealthCheckResponse.SERVING
        with contextlib.ExitStack() as stack:
            for i in range(HELD):
                hold(stack, endpoint, BEGUN[begun])
                if i % 8 == 0:
                    await asyncio.sleep(0.01)
            async with channel(endpoint, certs) as new:
                assert await checked(new, PATIENCE) == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.long
@pytest.mark.parametrize("seconds", [1.0])
async def test_a_handshake_has_a_time(endpoint: GrpcEndpoint, certs: Path, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        held = [hold(stack, endpoint, one) for one in BEGUN.values() for _ in range(4)]
        for one in held:
            one.setblocking(False)
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(20):
                    while await loop.sock_recv(one, 1 << 16):
                        pass
        async with channel(endpoint, certs) as new:
            assert await checked(new, 20) == health_pb2.HealthCheckResponse.SERVING
