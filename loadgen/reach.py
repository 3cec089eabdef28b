"""Whether anything listens at an address, asked before a command relies on it."""

from __future__ import annotations

import re
import socket

SECONDS = 2.0
_HOST_PORT = re.compile(
    r"(?:(?P<scheme>https?)://)?(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:/\[\]]+))(?::(?P<port>\d{1,5}))?(?:/.*)?\Z"
)
_PORTS = {"http": 80, "https": 443}


def why_unreachable(address: str) -> str:
    """The reason why nothing can be connected to at HOST:PORT or http(s)://HOST[:PORT]; "" if something can, or for
    another form of address, such as gRPC's unix:PATH."""
    found = _HOST_PORT.match(address)
    port = found and (int(found["port"]) if found["port"] else _PORTS.get(found["scheme"] or ""))
    if found is None or not port:
        return ""
    host = found["v6"] or found["host"]
    try:
        socket.create_connection((host, port), timeout=SECONDS).close()
    except (OSError, OverflowError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""
