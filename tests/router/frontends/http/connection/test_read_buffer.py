"""A connection is read in pieces that do not lengthen a turn of the event loop, with TLS and without."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from baton.local.certs import make_certs
from cluster.security.tls import ClientTls
from router.frontends.http.connection.read_buffer import READ_BYTES, BufferedReads
from tests.harness.waiting import turns, until

SENT = bytes(range(256)) * (1 << 13)  # 2 MiB


class Recorder(asyncio.Protocol):
    """Pauses its connection at each piece."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.calls: list[str] = []
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.pieces.append(bytes(data))
        self.transport.pause_reading()

    def eof_received(self) -> None:
        self.calls.append("eof")

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.calls.append("lost")


@contextlib.asynccontextmanager
async def connected(
    recorder: Recorder, certs: Path | None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client of one connection, which the recorder reads."""
    loop = asyncio.get_running_loop()
    theirs = ours = None
    if certs is not None:
        make_certs(certs, [], 1)
        theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        theirs.load_cert_chain(certs / "router.pem", certs / "router.key")
        ours = ClientTls(certs / "ca.pem").context()
    listening = socket.create_server(("127.0.0.1", 0))
    made = [recorder]
    server = await loop.create_server(lambda: BufferedReads(made.pop), sock=listening, ssl=theirs)
    try:
        reader, writer = await asyncio.open_connection(*listening.getsockname(), ssl=ours)
        await until(lambda: recorder.transport is not None, "it is accepted")
        yield reader, writer
        writer.transport.abort()
        await until(lambda: recorder.calls[-1:] == ["lost"], "the end is told")
    finally:
        server.close()


def on_uvloop(test: Coroutine[Any, Any, None]) -> None:
    """As the router runs: asyncio's own loop reads otherwise."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test)


@pytest.mark.parametrize("tls", [False, True])
def test_a_piece_has_no_more_than_the_buffer_and_none_comes_while_paused(tls: bool, tmp_path: Path) -> None:
    async def test() -> None:
        recorder = Recorder()
        async with connected(recorder, tmp_path if tls else None) as (_, writer):
            writer.write(SENT)
            while sum(map(len, recorder.pieces)) < len(SENT):
                known = len(recorder.pieces)
                await until(lambda: len(recorder.pieces) > known, "the next piece")  # noqa: B023
                await turns(3)
                assert len(recorder.pieces) == known + 1
                recorder.transport.resume_reading()
        assert b"".join(recorder.pieces) == SENT
        assert max(map(len, recorder.pieces)) <= READ_BYTES

    on_uvloop(test())


def test_little_is_read_ahead_of_a_paused_connection(tmp_path: Path) -> None:
    async def test() -> None:
        recorder = Recorder()
        async with connected(recorder, tmp_path):
            assert recorder.transport.get_read_buffer_limits()[1] == READ_BYTES

    on_uvloop(test())


@pytest.mark.parametrize("tls", [False, True])
def test_nothing_is_left_of_a_connection_that_has_ended(tls: bool, tmp_path: Path) -> None:
    """A collection of the garbage of thousands would hold every stream."""

    async def test() -> None:
        recorder = Recorder()
        gc.disable()
        try:
            async with connected(recorder, tmp_path if tls else None):
                pass
            left = weakref.ref(recorder)
            del recorder
            await until(lambda: left() is None, "nothing is left", 5)
        finally:
            gc.enable()

    on_uvloop(test())


@pytest.mark.parametrize("tls", [False, True])
def test_the_protocol_learns_of_slow_readers_and_of_the_end(tls: bool, tmp_path: Path) -> None:
    async def test() -> None:
        recorder = Recorder()
        async with connected(recorder, tmp_path if tls else None) as (reader, writer):
            for _ in range(8):  # over TLS, the second write that does not fit pauses
                recorder.transport.write(SENT)
            await until(lambda: recorder.calls == ["pause"], "the transport is full")
            await reader.readexactly(len(SENT) * 8)
            await until(lambda: recorder.calls == ["pause", "resume"], "it has been read")
            if not tls:
                writer.write_eof()
                await until(lambda: "eof" in recorder.calls, "the end of the client's bytes")

    on_uvloop(test())
