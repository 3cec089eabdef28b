"""Which hosts and origins a router without API keys answers."""

from __future__ import annotations

import socket

import pytest

from cluster.errors import ForbiddenError
from router.frontends.http.web_pages import WebPages

CORS = "https://chat.example"
LOCAL: tuple[str, ...] = (
    "127.0.0.1:8000",
    "localhost:8000",
    "LOCALHOST",
    "[::1]:8000",
    "x",
    "baton:8000",
    "a.localhost",
)
LOCAL += (
    "10.1.2.3",
    "host.docker.internal",
    "chat.example:8000",
    "[::ffff:127.0.0.1]",
    "",
    socket.gethostname(),
)
REBOUND = (
    "evil.example",
    "evil.example:8000",
    "EVIL.example.",
    "127.0.0.1.nip.io",
    "localhost.evil.example",
    "a.b:x",
)


def refused(pages: WebPages, method: str = "POST", **headers: str) -> str | None:
    try:
        pages.check(method, [(name.encode(), value.encode()) for name, value in headers.items()])
    except ForbiddenError as error:
        return error.field
    return None


@pytest.mark.parametrize("listening", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_on_loopback_no_host_of_the_public_dns_is_answered(listening: str) -> None:
    pages = WebPages(listening, (CORS,))
    assert [host for host in LOCAL if refused(pages, host=host)] == []
    assert [host for host in REBOUND if refused(pages, "GET", host=host) != "host"] == []


def test_elsewhere_any_host_is_answered() -> None:
    for listening in ("0.0.0.0", "::", "10.0.0.1"):
        assert [host for host in (*LOCAL, *REBOUND) if refused(WebPages(listening, ()), host=host)] == []


@pytest.mark.parametrize("listening", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize(
    ("origin", "host", "is_refused"),
    [
        (CORS, "127.0.0.1:8000", False),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", False),
        ("https://x:1", "x:2", False),  # a proxy may end TLS, and listen elsewhere
        ("http://localhost:3000", "127.0.0.1:8000", False),  # another program of this machine
        ("http://[::1]:3000", "localhost:8000", False),
        ("http://localhost:3000", "10.0.0.1:8000", True),
        ("https://evil.example", "127.0.0.1:8000", True),
        ("https://evil.example", "", True),
        ("https://chat.example.evil.example", "127.0.0.1", True),
        ("http://chat.example", "127.0.0.1", True),
        ("null", "127.0.0.1:8000", True),  # a sandboxed frame of any site
        ("null", "", True),
        ("https://", "", True),
        ("app://desktop", "127.0.0.1:8000", False),
        ("chrome-extension://abc", "127.0.0.1:8000", False),
    ],
)
def test_origins(origin: str, host: str, is_refused: bool, listening: str) -> None:
    pages = WebPages(listening, (CORS,))
    for headers in ({"host": host, "origin": origin}, {"origin": origin, "host": host}):
        assert refused(pages, **headers) == ("origin" if is_refused else None)
    assert refused(pages, "OPTIONS", host=host, origin=origin) is None
    assert refused(WebPages(listening, ("*",)), host=host, origin=origin) is None
