"""Clients without a certificate cost a worker's gRPC port a few descriptors for a few seconds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.process.descriptors import free_for_connections
from cluster.security.identity import make_identity
from cluster.security.tls import Peers
from tests.security.attacks.grpc_frames import ALONE, GREETING
from worker import server
from worker.server import WorkerServer

LIMIT = 8
GOAWAY = 7  # a type of HTTP/2 frames


def peers(certs: Path, name: str) -> Peers:
    return Peers(make_identity(certs / f"{name}.pem", certs / f"{name}.key", certs / "ca.pem"))


async def test_silent_strangers_have_a_number_and_a_time(
    certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", LIMIT)
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 2)
    worker = WorkerServer("127.0.0.1", 0, peers(certs / "ours", "worker"), "127.0.0.1")
    worker.bind()
    await worker.start()
    port = int(worker.address.rpartition(":")[2])

    async def served(seconds: float) -> int:
        async with peers(certs / "ours", "router").channel(worker.address, ALONE) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            asked = stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds, wait_for_ready=True)
            return int((await asked).status)

    try:
        with contextlib.ExitStack() as stack:
            for _ in range(4 * LIMIT):
                with contextlib.suppress(OSError):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            await asyncio.sleep(0.5)
            held = [
                one
                for one in psutil.Process().net_connections("tcp")
                if one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED
            ]
            assert 0 < len(held) <= LIMIT
            assert await served(20) == health_pb2.HealthCheckResponse.SERVING
    finally:
        await worker.stop(0)


async def test_compressed_messages_are_refused(certs: Path) -> None:
    """64 KiB would become 64 MiB."""
    worker = WorkerServer("127.0.0.1", 0, peers(certs / "ours", "worker"), "127.0.0.1")
    worker.bind()
    await worker.start()
    request = health_pb2.HealthCheckRequest(service="x" * 1000)
    try:
        async with peers(certs / "ours", "router").channel(worker.address, ALONE) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(request, timeout=20, compression=grpc.Compression.Gzip)
    finally:
        await worker.stop(0)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_low_limit_of_files_leaves_some_for_redis_and_peers() -> None:
    assert [free_for_connections(files) for files in (256, 1024, 20_000)] == [128, 512, 19_488]


async def test_a_connection_has_an_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then its certificate may have expired, or its authority been removed."""
    monkeypatch.setattr(server, "MAX_CONNECTION_SECONDS", 0.2)
    worker = WorkerServer("127.0.0.1", 0, Peers(), "127.0.0.1")
    worker.bind()
    await worker.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(worker.address.rpartition(":")[2]))
        writer.write(GREETING)
        async with asyncio.timeout(10):
            while (head := await reader.readexactly(9))[3] != GOAWAY:
                await reader.readexactly(int.from_bytes(head[:3], "big"))
        writer.close()
    finally:
        await worker.stop(0)


async def test_a_peer_that_acknowledges_no_settings_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then no limit of metadata applies. gRPC's own time is 60 s."""
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 1)
    worker = WorkerServer("127.0.0.1", 0, Peers(), "127.0.0.1")
    worker.bind()
    await worker.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(worker.address.rpartition(":")[2]))
        writer.write(GREETING)
        async with asyncio.timeout(30):
            while await reader.read(1 << 16):
                pass
        writer.close()
    finally:
        await worker.stop(0)
