"""The number of bytes sent on a connection that the client's system has received."""

from __future__ import annotations

import asyncio
import socket
import struct

# struct tcp_info of Linux (since 4.1): tcpi_bytes_acked, 64 bits.
_OFFSET, _FIELD = 120, struct.Struct("=Q")


def acknowledged_bytes(transport: asyncio.BaseTransport) -> int:
    """Bytes acknowledged since the connection began, counting TLS records; 0 on systems that do not report it.

    The transport's own buffer is no measure: its bytes move to the kernel's buffer a quarter of a megabyte at a time, and
    with TLS it is empty while the buffer below it is full.
    """
    sock = transport.get_extra_info("socket")
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _OFFSET + _FIELD.size)
    except (AttributeError, OSError, ValueError):  # not Linux; not TCP; closed, in uvloop with descriptor -1
        return 0
    return int(_FIELD.unpack_from(info, _OFFSET)[0]) if len(info) >= _OFFSET + _FIELD.size else 0
