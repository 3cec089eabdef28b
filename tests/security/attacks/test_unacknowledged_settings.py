"""Clients that do not acknowledge the settings of the router's gRPC port, to which no limit of headers applies."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from cluster.config.router import RouterConfig
from router.grpc_endpoint import GrpcEndpoint
from tests.security.attacks.grpc_frames import ACKNOWLEDGED, END_HEADERS, GREETING, HEADERS, frame
from tests.security.attacks.header_flood import (
    ACCEPT_ENCODING,
    FIELDS,
    HEAD,
    KINDS,
)

SECONDS = 1.0
LATEST = 30.0  # gRPC's own time is 60 s
PING = frame(6, 0, 0, bytes(8))
ANSWERED_PING = frame(6, 1, 0, bytes(8))


@pytest.fixture
async def where() -> AsyncIterator[tuple[str, int]]:
    config = RouterConfig(model=Path("m"), grpc_port=0, header_seconds=SECONDS, grpc_idle_seconds=300)
    endpoint = GrpcEndpoint(config, MagicMock(), None, ask_clients=False)
    await endpoint.start()
    host, _, port = endpoint.address.rpartition(":")
    yield host, int(port)
    await endpoint.stop(0)


def ends(where: tuple[str, int], once: bytes, again: bytes, seconds: float) -> bool:
    """Whether the server ends a connection on which this comes, before LATEST. It comes again after so many seconds at
    the earliest."""
    with socket.create_connection(where, 10) as sock, contextlib.suppress(ConnectionError):
        deadline = time.monotonic() + LATEST
        sock.setblocking(False)
        rest, paused_until = memoryview(GREETING + once), 0.0
        while (now := time.monotonic()) < deadline:
            wants = [sock] if now >= paused_until and (rest or again) else []
            readable, writable, _ = select.select([sock], wants, [], 0.2)
            if readable and not sock.recv(1 << 16):
                return True
            if writable:
                rest = rest or memoryview(again)
                rest = rest[sock.send(rest) :]
                paused_until = 0.0 if rest else now + seconds
        return False
    return True


@pytest.mark.parametrize(
    ("once", "again"),
    [(b"", b""), (HEAD, b""), KINDS["literals"], KINDS["references"], KINDS["settings"]],
    ids=["silent", "half a header", "literals", "references", "settings"],
)
async def test_a_client_that_acknowledges_no_settings_is_disconnected(
    where: tuple[str, int], once: bytes, again: bytes
) -> None:
    """What it had sent of a header, up to 120 MiB in memory, stayed until the connection ended."""
    assert await asyncio.to_thread(ends, where, once, again, 0.2)


@pytest.mark.parametrize("once", [b"", ACKNOWLEDGED], ids=["unacknowledged", "acknowledged"])
async def test_a_client_that_sends_faster_than_grpc_reads_is_disconnected(
    where: tuple[str, int], once: bytes
) -> None:
    """gRPC ends no connection before it has read all: this one lasted as long as its client wished."""
    window_updates = KINDS["window updates"][1] * 5000
    assert await asyncio.to_thread(ends, where, once, window_updates, 0.0)


async def test_a_client_that_acknowledges_them_stays(where: tuple[str, int]) -> None:
    def stays() -> bytes:
        with socket.create_connection(where, 10) as sock, socket.create_connection(where, 10) as silent:
            silent.sendall(GREETING)
            sock.sendall(GREETING + ACKNOWLEDGED)
            while silent.recv(1 << 16):
                pass
            sock.sendall(PING)
            received = b""
            while ANSWERED_PING not in received and (came := sock.recv(1 << 16)):
                received += came
            return received

    assert ANSWERED_PING in await asyncio.to_thread(stays)


async def test_the_limit_of_metadata_holds_once_it_is_acknowledged(where: tuple[str, int]) -> None:
    """16 KiB on the wire, which count as 0.7 MiB of metadata, in one frame."""
    call = frame(HEADERS, END_HEADERS, 1, FIELDS + ACCEPT_ENCODING * (16_000 - len(FIELDS)))

    def refused() -> bytes:
        with socket.create_connection(where, 10) as sock:
            sock.sendall(GREETING)
            sock.recv(1 << 16)
            sock.sendall(ACKNOWLEDGED + call)
            received = b""
            while b"grpc-status" not in received and (came := sock.recv(1 << 16)):
                received += came
            return received

    assert b"grpc-status\x018" in await asyncio.to_thread(refused), "RESOURCE_EXHAUSTED, by gRPC itself"
