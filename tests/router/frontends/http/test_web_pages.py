"""Which hosts and origins a router without API keys answers."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import ForbiddenError
from router.frontends.http import web_pages
from router.frontends.http.gate import Gate
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
    "laptop.local:8000",
    "laptop.lan",
    "laptop.home.arpa.",
    "127.1",
    "localhost.",
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
    "evil.arpa",
    "evilhome.arpa",
    "local.example",
    "a.b:x",
)


def refused(pages: WebPages, method: str = "POST", reached: str = "127.0.0.1", **headers: str) -> str | None:
    try:
        pages.check(method, [(name.encode(), value.encode()) for name, value in headers.items()], reached)
    except ForbiddenError as error:
        return error.field
    return None


@pytest.mark.parametrize("reached", ["127.0.0.1", "127.0.0.2", "::1", "::ffff:127.0.0.1"])
def test_over_loopback_no_host_of_the_public_dns_is_answered(reached: str) -> None:
    pages = WebPages((CORS,))
    assert [host for host in LOCAL if refused(pages, reached=reached, host=host)] == []
    assert [host for host in REBOUND if refused(pages, "GET", reached, host=host) != "host"] == []


@pytest.mark.parametrize("reached", ["10.0.0.1", "2001:db8::1", "::ffff:10.0.0.1", ""])
def test_elsewhere_any_host_is_answered(reached: str) -> None:
    pages = WebPages(())
    assert [host for host in (*LOCAL, *REBOUND) if refused(pages, reached=reached, host=host)] == []


@pytest.mark.parametrize("listening", ["0.0.0.0", "::", "127.1", "localhost."])
async def test_the_connections_address_counts_not_the_one_listened_on(listening: str) -> None:
    config = SimpleNamespace(ui=False, host=listening, cors_origins=())
    refusals = SimpleNamespace(refused=lambda: None)
    gateway: Any = SimpleNamespace(
        config=config, keys=SimpleNamespace(on=False), low_priority=Unordered(), metrics=refusals
    )
    app: Any = None
    gate = Gate(app, gateway)
    scope: Any = {"method": "GET", "path": "/v1/models", "headers": [(b"host", b"evil.example")]}
    for server, status in ((("127.0.0.1", 1), 403), (("::ffff:127.0.0.1", 1), 403), (("10.0.0.1", 1), None)):
        answer = await gate.refusal({**scope, "server": server})
        assert (answer and answer.status_code) == status, server


class Unordered:
    async def step(self, tenant: str = "") -> None:
        pass


@pytest.mark.parametrize("reached", ["127.0.0.1", "10.0.0.1"])
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
        ("file://", "127.0.0.1:8000", True),  # any page that was saved
        ("ipfs://bafybei", "127.0.0.1:8000", True),
        ("ipns://evil.example", "127.0.0.1:8000", True),
        ("app://desktop", "127.0.0.1:8000", False),
        ("chrome-extension://abc", "127.0.0.1:8000", False),
    ],
)
def test_a_page_of_another_origin_is_refused_unless_it_is_listed(
    origin: str, host: str, is_refused: bool, reached: str
) -> None:
    pages = WebPages((CORS,))
    for headers in ({"host": host, "origin": origin}, {"origin": origin, "host": host}):
        assert refused(pages, reached=reached, **headers) == ("origin" if is_refused else None)
    assert refused(pages, "OPTIONS", reached, host=host, origin=origin) is None
    assert refused(WebPages(("*",)), "POST", reached, host=host, origin=origin) is None
    assert refused(WebPages((origin,)), "POST", reached, host=host, origin=origin) is None


def test_a_local_address_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def is_loopback(address: str) -> bool:
        read.append(address)
        return address == "127.0.0.1"

    monkeypatch.setattr(web_pages, "is_loopback", is_loopback)
    pages = WebPages(())
    for _ in range(3):
        pages.check("POST", [(b"host", b"example.com")], "10.0.0.1")
        with pytest.raises(ForbiddenError):
            pages.check("POST", [(b"host", b"example.com")], "127.0.0.1")
    assert read == ["10.0.0.1", "127.0.0.1"]
