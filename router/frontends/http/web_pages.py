"""Refuses what web pages of other origins send, where requests need no API key.

A browser sends a page's request to any address that it reaches, the user's own machine included, and only keeps the answer
from the page. By DNS rebinding the page reads the answer as well: its own name resolves to 127.0.0.1 the second time. A
page has no API key, so this is needed without keys only. Browsers name the page's origin in requests that may change
something, and the page's own name as Host.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from cluster.addresses import is_loopback
from cluster.errors import ForbiddenError

LOCAL_ZONES = ("localhost", "internal")  # no name below them is in the public DNS
RawHeaders = Iterable[tuple[bytes, bytes]]


class WebPages:
    """`host`: the address that the router listens on. On loopback it is reached by local names and addresses only."""

    def __init__(self, host: str, cors_origins: Sequence[str]):
        self._any = "*" in cors_origins
        self._origins = frozenset(cors_origins)
        self._only_local = is_loopback(host)
        self._names = {_name(urlsplit(origin).netloc) for origin in cors_origins}
        self._names.add(socket.gethostname().lower())

    def check(self, method: str, headers: RawHeaders) -> None:
        """Raises ForbiddenError. OPTIONS changes and shows nothing."""
        if self._any or method == "OPTIONS":
            return
        host = origin = ""
        for name, value in headers:
            if name == b"host":
                host = value.decode("latin-1")
                self._check_host(host)
            elif name == b"origin":
                origin = value.decode("latin-1")
        if origin:
            self._check_origin(origin, host)

    def _check_host(self, host: str) -> None:
        if self._only_local and not _is_local(name := _name(host)) and name not in self._names:
            raise ForbiddenError(
                "host: this router needs no API key and listens on loopback, so it answers requests to localhost and to "
                "addresses only; name the origin with this host in cors_origins, or require API keys",
                field="host",
            )

    def _check_origin(self, origin: str, host: str) -> None:
        scheme = origin.partition(":")[0]
        if origin in self._origins or scheme not in ("http", "https", "null"):
            return  # other schemes are those of programs: extensions, desktop applications
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
    return "." not in name or name.rpartition(".")[2] in LOCAL_ZONES or _is_address(name)


def _is_address(name: str) -> bool:
    """IPv6 addresses have no dot, or end like these."""
    return name.rpartition(".")[2].isdigit()


def _is_own(name: str) -> bool:
    return name.rpartition(".")[2] == "localhost" or is_loopback(name)
