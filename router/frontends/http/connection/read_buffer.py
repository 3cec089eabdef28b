"""Reads of a connection, at most 64 KiB at a time.

To a plain protocol uvloop passes whatever has arrived: up to 256 KiB, over TLS 512 KiB, joined in new memory. A request
pauses its connection only afterwards, so fifty clients that began long bodies at once made turns of 60 ms, which every
other client waited for. Into a protocol's own buffer uvloop reads what fits, and the protocol pauses after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

# A request whose body is longer, and not yet taken by its endpoint, pauses the connection.
READ_BYTES = HIGH_WATER_LIMIT


class BufferedReads(asyncio.BufferedProtocol):
    """Between a transport and a protocol, whose `data_received` gets a view that is valid until it returns.

    All connections have one buffer: a process has one event loop, which fills it and calls `buffer_updated` at once.
    """

    _buffer = memoryview(bytearray(READ_BYTES))

    def __init__(self, make: Callable[[], asyncio.Protocol]):
        """`make`: called once the connection is made, over TLS after the handshake."""
        self._make = make
        self._protocol: asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        if transport.get_extra_info("sslcontext") is not None:
            # Above it no more is read ahead; uvloop reads up to 256 KiB at a time of what is not decrypted yet
            transport.set_read_buffer_limits(READ_BYTES)
        self._protocol = self._make()
        self._protocol.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._protocol.data_received(self._buffer[:nbytes])  # type: ignore[arg-type]

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            self._protocol.connection_lost(exc)
        finally:
            # uvloop's TLS keeps methods of this object; as garbage each connection would keep 256 KiB
            del self._protocol
