"""Addresses that a process listens on and advertises."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from urllib.parse import urlsplit

import psutil

WILDCARDS = frozenset({"0.0.0.0", "::", ""})
_ANY_PORT = 9  # connecting a UDP socket sends nothing; the kernel only chooses a route


def join(host: str, port: int) -> str:
    """Format host:port, an IPv6 address in brackets."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split(address: str) -> tuple[str, int]:
    """Host and port of host:port, an IPv6 address without its brackets. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def advertised(host: str, advertise_host: str, redis_url: str) -> str:
    """Return the host to register: the configured one, else the address listened on.

    A process that listens on all addresses registers the one from which this machine reaches Redis, because every
    reader of the registration reaches Redis too.
    """
    if advertise_host or host not in WILDCARDS:
        return advertise_host or host
    return source_address(_redis_host(redis_url)) or ("::1" if host == "::" else "127.0.0.1")


def _redis_host(redis_url: str) -> str:
    """The first host of a Redis URL, which may name several."""
    if redis_url.startswith("unix:"):
        return ""
    netloc = re.split("[/?#]", redis_url.partition("://")[2], maxsplit=1)[0]
    return urlsplit(f"//{netloc.rpartition('@')[2].partition(',')[0]}").hostname or ""


def source_address(peer: str) -> str:
    """Return this machine's address on the route to `peer`, or "" if the peer does not resolve or has no route."""
    if not peer:
        return ""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as sock:
                sock.connect(address)
                return str(ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]))
    return ""


def is_loopback(host: str) -> bool:
    """Whether a host is `localhost` or a loopback address, IPv4-mapped IPv6 addresses included."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.strip("[]"))
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback
    return host in ("localhost", "localhost.")


def interface_of(host: str) -> str:
    """Return the network interface that has the address of `host`, or "" if none has."""
    if is_loopback(host):
        # No interface lists 127.0.0.2 and other loopback addresses.
        return _interface_with({"127.0.0.1", "::1"})
    with contextlib.suppress(OSError):
        return _interface_with({str(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), None)})
    return ""


def _interface_with(addresses: set[str]) -> str:
    for name, own in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] in addresses for one in own):
            # What follows a colon labels a further address of the same interface.
            return name.partition(":")[0]
    return ""
