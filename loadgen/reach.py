"""Whether anything listens at an address, asked before a command relies on it."""

from __future__ import annotations

import os
import re
import socket
from urllib.request import proxy_bypass

SECONDS = 2.0
_HOST_PORT = re.compile(
    r"(?:(?P<scheme>https?)://)?(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:/\[\]]+))(?::(?P<port>\d{1,5}))?(?:/.*)?\Z"
)
_PORTS = {"http": 80, "https": 443}
_LOOPBACK = re.compile(r"localhost|127\.[\d.]+|::1")
_GRPC_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # gRPC takes the first that is set


def why_unreachable(address: str) -> str:
    """The reason why nothing can be connected to at HOST:PORT or http(s)://HOST[:PORT]; "" if something can, for
    another form of address, such as gRPC's unix:PATH, and for one that gRPC reaches by a proxy of the environment."""
    found = _HOST_PORT.match(address)
    port = found and (int(found["port"]) if found["port"] else _PORTS.get(found["scheme"] or ""))
    if found is None or not port:
        return ""
    host = found["v6"] or found["host"]
    if not found["scheme"] and _by_proxy(host):
        return ""
    try:
        socket.create_connection((host, port), timeout=SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def _by_proxy(host: str) -> bool:
    if _LOOPBACK.fullmatch(host) or proxy_bypass(host):
        return False
    return any(os.environ.get(name) for name in _GRPC_PROXIES)
