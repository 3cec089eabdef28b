"""The kernel's report of a connection: the bytes that the client's system has received, and the client's end."""

from __future__ import annotations

import asyncio
import enum
import socket
import struct

# struct tcp_info of Linux (since 4.1): tcpi_bytes_acked, 64 bits.
_OFFSET, _FIELD = 120, struct.Struct("=Q")


class TcpState(enum.IntEnum):
    """Values of tcpi_state, the first byte of tcp_info."""

    CLOSE = 7  # the client has reset the connection
    CLOSE_WAIT = 8  # the client sends no more


_STATES = {int(state): state for state in TcpState}


def acknowledged_bytes(transport: asyncio.BaseTransport) -> int:
    """Bytes acknowledged since the connection began, counting TLS records; 0 on systems that do not report it.

    The transport's own buffer is no measure: its bytes move to the kernel's buffer a quarter of a megabyte at a time, and
    with TLS it is empty while the buffer below it is full.
    """
    info = _tcp_info(transport)
    return int(_FIELD.unpack_from(info, _OFFSET)[0]) if len(info) >= _OFFSET + _FIELD.size else 0


def client_has_ended(transport: asyncio.BaseTransport) -> bool:
    """Whether the client's end, or its reset, has arrived, though nothing reads it. False on systems without TCP_INFO."""
    return _state(_tcp_info(transport)) is not None


def state_of(sock: socket.socket) -> TcpState | None:
    """None: neither state; or a system without TCP_INFO."""
    try:
        return _state(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1))
    except (AttributeError, OSError):
        return None


def _state(info: bytes) -> TcpState | None:
    return _STATES.get(info[0]) if info else None


def _tcp_info(transport: asyncio.BaseTransport) -> bytes:
    sock = transport.get_extra_info("socket")
    try:
        info: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _OFFSET + _FIELD.size)
    except (AttributeError, OSError, ValueError):  # not Linux; not TCP; closed, in uvloop with descriptor -1
        return b""
    return info
