"""Messages between a router's parent and its processes: JSON behind its length, over a pair of sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("!I")
Message = dict[str, Any]


def encode(message: Message) -> bytes:
    raw = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(raw)) + raw


def receive(sock: socket.socket) -> Message | None:
    """Blocks until a message has arrived; None: the other end is closed."""
    head = _receive_exactly(sock, _LENGTH.size)
    raw = _receive_exactly(sock, _length(head)) if head is not None else None
    return None if raw is None else _decode(raw)


async def read(reader: asyncio.StreamReader) -> Message | None:
    """The next message, as `receive` returns it."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        return _decode(await reader.readexactly(_length(head)))
    except (asyncio.IncompleteReadError, OSError):
        return None


def _length(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes; at most {MAX_FRAME_BYTES}")
    return int(length)


def _decode(raw: bytes) -> Message:
    message: Message = json.loads(raw)
    return message


def _receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            more = sock.recv(size - len(parts))
        except OSError:
            return None
        if not more:
            return None
        parts += more
    return bytes(parts)
