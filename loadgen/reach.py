"""Whether anything listens at an address, and whether that can be gRPC, asked before a command relies on it."""

from __future__ import annotations

import os
import re
import socket
import ssl
from ipaddress import IPv6Address
from typing import NamedTuple
from urllib.request import proxy_bypass

SECONDS = 2.0
_HOST_PORT = re.compile(
    r"(?:(?P<scheme>https?)://)?(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:/\[\]]+))(?::(?P<port>\d{1,5}))?(?:/.*)?\Z"
)
_PORTS = {"http": 80, "https": 443}
# Of names that gRPC resolves: `dns:///host:port`, `unix:/path`, …
_GRPC_SCHEME = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):")
LAST_PORT = 65535
_GRPC_PORT = 443  # where gRPC connects to if an address has none
# What a client of HTTP/2 sends first: the preface, and empty settings
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_HTTP1 = b"HTTP/"
UNTRUSTED = (
    "its certificate is not signed by a trusted authority, or is for another host name: "
    "give the authority by --tls-ca"
)
_LOOPBACK = re.compile(r"localhost|127\.[\d.]+|::1")
_GRPC_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # gRPC takes the first that is set


class NotGrpc(NamedTuple):
    """Why a client of gRPC cannot use an address, and what to give instead. `is_http`: the address is an HTTP URL, or a
    server of HTTP listens at it."""

    reason: str
    is_http: bool = False


def why_unreachable(address: str) -> str:
    """The reason why nothing can be connected to at HOST:PORT or http(s)://HOST[:PORT]; "" if something can, for
    another form of address, such as gRPC's unix:PATH, and for one that gRPC reaches by a proxy of the environment."""
    found = _HOST_PORT.match(address)
    port = found and (int(found["port"]) if found["port"] else _PORTS.get(found["scheme"] or ""))
    if found is None or not port:
        return ""
    if port > LAST_PORT:  # else the C library would take another one
        return f"ports end at {LAST_PORT}"
    host = found["v6"] or found["host"]
    if not found["scheme"] and _by_proxy(host):
        return ""
    try:
        socket.create_connection((host, port), timeout=SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        return str(getattr(error, "strerror", None) or error)
    return ""


def why_not_grpc(address: str, *, tls: ssl.SSLContext | None) -> NotGrpc | None:
    """Why a client of gRPC, without TLS or with what `tls` trusts, cannot talk to what listens at `address`; None if it
    may."""
    if "://" in address and not _GRPC_SCHEME.match(address):
        return NotGrpc(
            "gRPC addresses are written host:port: name a router's gRPC port (50051 by default)", is_http=True
        )
    found = _HOST_PORT.match(address)
    if found is None and _is_bare_v6(address):
        return NotGrpc(f"an IPv6 address is written in brackets, before its port: [{address}]:50051")
    if not address:
        return NotGrpc("an address is written host:port")
    if found is None or _by_proxy(found["v6"] or found["host"]):
        return None
    if not found["port"]:
        nothing = why_unreachable(f"{address}:{_GRPC_PORT}")
        if not nothing:
            return None
        return NotGrpc(
            f"it names no port, and port {_GRPC_PORT} cannot be reached ({nothing}): write host:port"
        )
    endpoint = (found["v6"] or found["host"], int(found["port"]))
    reply = _reply(endpoint, _PREFACE)
    if reply is None:
        return None
    if tls is not None:
        if reply and _is_plain(reply):
            return NotGrpc("this port does not use TLS: leave --tls-ca out")
        return None if _is_trusted(endpoint, tls) else NotGrpc(UNTRUSTED)
    if reply.startswith(_HTTP1):
        return NotGrpc("this port serves HTTP: name a router's gRPC port (50051 by default)", is_http=True)
    if not reply and _accepts_tls(endpoint):
        return NotGrpc("this port requires TLS: give its authority by --tls-ca")
    return None


def why_not_http(address: str, *, tls: ssl.SSLContext | None = None) -> str:
    """Why a client of HTTP, which has TLS where the address begins with https://, cannot talk to what listens at
    `address`, and what to give instead; "" if it may."""
    found = _HOST_PORT.match(address)
    if found is None:
        return ""
    endpoint = (found["v6"] or found["host"], int(found["port"] or _PORTS[found["scheme"] or "http"]))
    if found["scheme"] == "https":
        return "" if tls is None or _is_trusted(endpoint, tls) else UNTRUSTED
    reply = _reply(endpoint, b"GET /health HTTP/1.1\r\nhost: baton\r\n\r\n")
    if reply is None or reply.startswith(_HTTP1):
        return ""
    if _is_plain(reply):
        return "this port serves gRPC: name a router's HTTP port (8000 by default)"
    return "this port requires TLS: write https://" if _accepts_tls(endpoint) else ""


def _reply(endpoint: tuple[str, int], sent: bytes) -> bytes | None:
    """The first bytes of the server's answer, empty if it closes the connection; None if it has none, or is not there."""
    try:
        with socket.create_connection(endpoint, timeout=SECONDS) as connection:
            connection.sendall(sent)
            return connection.recv(9)
    except ConnectionResetError:
        return b""
    except (OSError, OverflowError, UnicodeError):
        return None


def _is_plain(reply: bytes) -> bool:
    """Whether it is one of HTTP/1, or the settings with which a server of HTTP/2 begins."""
    return reply.startswith(_HTTP1) or reply[3:4] == b"\x04"


def _accepts_tls(endpoint: tuple[str, int]) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(endpoint, timeout=SECONDS) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False


def _is_trusted(endpoint: tuple[str, int], context: ssl.SSLContext) -> bool:
    """False only where the handshake fails by the server's certificate."""
    try:
        with (
            socket.create_connection(endpoint, timeout=SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=endpoint[0]),
        ):
            return True
    except ssl.SSLCertVerificationError:
        return False
    except (OSError, ValueError):  # ValueError: no name that a certificate may hold
        return True


def goes_by_proxy(address: str) -> bool:
    """Whether gRPC is to reach `address` by a proxy of the environment, which it would use for loopback addresses too."""
    found = _HOST_PORT.match(address)
    return found is None or _by_proxy(found["v6"] or found["host"])


def _is_bare_v6(address: str) -> bool:
    try:
        return bool(IPv6Address(address))
    except ValueError:
        return False


def _by_proxy(host: str) -> bool:
    if _LOOPBACK.fullmatch(host) or proxy_bypass(host):
        return False
    return any(os.environ.get(name) for name in _GRPC_PROXIES)
