"""A head that RFC 9112 demands to refuse is refused as other malformed ones."""

from __future__ import annotations

import json

from tests.router.frontends.http.header_server import exchange, serving

REFUSED = {
    b"GET / HTTP/1.1\r\n\r\n": "host",
    b"GET / HTTP/1.1\r\nhost: a\r\nHost: a\r\n\r\n": "host",
    b"GET / HTTP/1.0\r\nhost: a\r\nHost: b\r\n\r\n": "host",
    b"GET /\r\n\r\n": None,
    b"GET / HTTP/0.9\r\nhost: a\r\n\r\n": None,
    b"GET / HTTP/2.0\r\nhost: a\r\n\r\n": None,
}
SERVED = (
    b"GET / HTTP/1.0\r\n\r\n",
    b"GET / HTTP/1.0\r\nhost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost:\r\n\r\n",
)


async def test_it_has_one_host_and_a_version_that_is_served():
    async with serving("direct") as address:
        for head, field in REFUSED.items():
            answer, _, body = (await exchange(address, head)).partition(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 400 ") and b"connection: close" in answer, head
            assert json.loads(body)["error"]["param"] == field, head
        for head in SERVED:
            assert b" 200 " in (await exchange(address, head)).partition(b"\r\n")[0], head
