"""A head that RFC 9112 demands to refuse is refused as other malformed ones."""

from __future__ import annotations

import json

import pytest

from router.frontends.http.connection.head import why_refused
from tests.router.frontends.http.connection.cycles import CYCLES
from tests.router.frontends.http.connection.header_server import exchange, serving

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
    b"GET / HTTP/1.1\r\nHost: \t a:80 \t \r\n\r\n",
    b"GET http://another/ HTTP/1.1\r\nHost: a\r\n\r\n",
)
HOSTS = (
    *(
        b"",
        b"a",
        b"a:",
        b"a:80",
        b":80",
        b"a_b.example.",
        b"%41",
        b"a,b",
        b"127.0.0.1:8000",
        b"[::1]",
        b"[::1]:80",
    ),
    *(b"[::ffff:10.0.0.1]", b"[v1.a:b]:1", b"xn--bcher-kva.example", b"x" * 30_000),
)
NO_HOSTS = (
    *(
        b"a b",
        b"a, b",
        b"a/b",
        b"a?b",
        b"a#b",
        b"a@b",
        b"a:80:80",
        b"a:b",
        b"::1",
        b"[",
        b"[]",
        b"[::1",
        b"[::1]a",
    ),
    *(
        b"[g]",
        b"[v1.]",
        b"[::1%25eth0]",
        b"%4",
        b"%gg",
        b'"a"',
        b"a\\b",
        b"a\x00",
        b"\xff",
        b"\xc3\xbc",
        b"x" * 30_000 + b"/",
    ),
)


async def test_it_has_one_host_and_a_version_that_is_served():
    async with serving("direct") as address:
        for head, field in REFUSED.items():
            answer, _, body = (await exchange(address, head)).partition(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 400 ") and b"connection: close" in answer, head
            assert json.loads(body)["error"]["param"] == field, head
        for head in SERVED:
            assert b" 200 " in (await exchange(address, head)).partition(b"\r\n")[0], head


@pytest.mark.parametrize("value", HOSTS)
def test_a_host_is_a_name_or_an_address_and_perhaps_a_port(value: bytes) -> None:
    assert why_refused("1.1", [(b"host", value)]) is None


@pytest.mark.parametrize("value", NO_HOSTS)
def test_another_value_is_no_host(value: bytes) -> None:
    for version in ("1.0", "1.1"):
        refusal = why_refused(version, [(b"host", value)])
        assert refusal is not None and refusal.field == "host" and len(refusal.message) < 500


async def test_an_invalid_host_is_refused_before_the_body_is_read():
    async with serving("direct") as address:
        answer = await exchange(address, b"POST / HTTP/1.1\r\nhost: a/b\r\ncontent-length: 9\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and b"connection: close" in answer


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"x, Chunked"])
async def test_another_coding_than_chunks_is_refused(coding: bytes):
    """Its body was read as if it were none."""
    head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: %b\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    async with serving("direct") as address:
        answer = await exchange(address, head % coding)
        assert answer.startswith(b"HTTP/1.1 400 ") and b"transfer-encoding" in answer
        for served in (b"chunked", b"Chunked"):
            assert (await exchange(address, head % served)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("cycle", CYCLES)
async def test_white_space_around_a_value_is_no_part_of_it(cycle: str):
    """What compares values, as the check of origins does, would take `null ` for another one than `null`."""
    head = b"GET / HTTP/1.1\r\nhost: a \t\r\norigin: \t null \t \r\n\r\n"
    async with serving(cycle) as address:
        answer = await exchange(address, head)
    assert answer.endswith(b"\r\n\r\n0;host=a,origin=null")


@pytest.mark.parametrize("cycle", CYCLES)
async def test_a_client_of_http_1_0_gets_its_answer_only(cycle: str):
    """It would take `100 Continue` for that (RFC 9110, 10.1.1)."""
    head = b"POST / HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    async with serving(cycle) as address:
        assert (await exchange(address, head + b"{}")).startswith(b"HTTP/1.1 200 ")
