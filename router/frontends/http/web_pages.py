"""Refuses what web pages of other origins send, where requests need no API key.

A browser sends a page's request to any address that it reaches, the user's own machine included, and only keeps the answer
from the page. By DNS rebinding the page reads the answer as well: its own name resolves to 127.0.0.1 the second time. A
page has no API key, so this is needed without keys only. Browsers name the page's origin in requests that may change
something, and the page's own name as Host.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from cluster.addresses import is_loopback
from cluster.errors import ForbiddenError

# No name below them is in the public DNS: reserved for such use (RFC 6761, 6762 and 8375; ICANN for internal), and what
# home routers use.
LOCAL_ZONES = ("localhost", "internal", "local", "lan", "home.arpa")
# Schemes of pages that anyone may have written; "null" is the origin of a sandboxed frame or of an opened file too. Other
# schemes are those of installed programs: extensions, desktop applications.
PAGE_SCHEMES = frozenset({"http", "https", "null", "file", "ipfs", "ipns"})
_LOCAL_ENDS = tuple(f".{zone}" for zone in LOCAL_ZONES)
MAX_LOCAL_ADDRESSES = 64  # of this machine, kept
RawHeaders = Iterable[tuple[bytes, bytes]]


class WebPages:
    """Checks of the origin of requests, and over loopback of the host: it must be a local name or an address."""

    def __init__(self, cors_origins: Sequence[str]):
        self._any = "*" in cors_origins
        self._origins = frozenset(cors_origins)
        self._names = {_name(urlsplit(origin).netloc) for origin in cors_origins}
        self._names.add(socket.gethostname().lower())
        # Reading an address costs more than the rest of a check.
        self._is_loopback = lru_cache(MAX_LOCAL_ADDRESSES)(is_loopback)

    def check(self, method: str, headers: RawHeaders, local_address: str) -> None:
        """Raises ForbiddenError. OPTIONS changes and shows nothing. `local_address`: this end of the connection."""
        if self._any or method == "OPTIONS":
            return
        only_local = self._is_loopback(local_address)
        host = origin = ""
        for name, value in headers:
            if name == b"host":
                host = value.decode("latin-1")
                if only_local:
                    self._check_host(host)
            elif name == b"origin":
                origin = value.decode("latin-1")
        if origin:
            self._check_origin(origin, host)

    def _check_host(self, host: str) -> None:
        if not _is_local(name := _name(host)) and name not in self._names:
            raise ForbiddenError(
                "host: this router needs no API key, so over loopback it answers requests to localhost, local names and "
                "addresses only; name the origin with this host in cors_origins, or require API keys",
                field="host",
            )

    def _check_origin(self, origin: str, host: str) -> None:
        if origin in self._origins or origin.partition(":")[0] not in PAGE_SCHEMES:
            return
        page, asked = _name(origin.partition("://")[2]), _name(host)
        if not page or (page != asked and not (_is_own(page) and _is_own(asked))):
            raise ForbiddenError(
                "origin: this router needs no API key, so pages of other origins may not call it; name the origin in "
                "cors_origins, or require API keys",
                field="origin",
            )


def _name(address: str) -> str:
    """The name or address of host:port, lower case, without brackets and a last dot."""
    try:
        return (urlsplit(f"//{address}").hostname or "").rstrip(".")
    except ValueError:
        return address.lower()


def _is_local(name: str) -> bool:
    """Whether no public DNS resolves the name: an address, a name without dots, or below LOCAL_ZONES."""
    return "." not in name or f".{name}".endswith(_LOCAL_ENDS) or _is_address(name)


def _is_address(name: str) -> bool:
    """IPv6 addresses have no dot, or end like these."""
    return name.rpartition(".")[2].isdigit()


def _is_own(name: str) -> bool:
    return name.rpartition(".")[2] == "localhost" or is_loopback(name)
