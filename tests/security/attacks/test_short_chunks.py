"""Bodies in chunks of one byte, and trailers: the parser calls for each of them, 20,000 times for 128 KiB."""

from __future__ import annotations

import socket

import pytest

from router.frontends.http.connection.short_chunks import MAX_SHORT_CHUNKS, SHORT_BYTES
from tests.harness.router import KeyFile, Router, known_key

HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nauthorization: Bearer {}\r\n\r\n"
BODY = b'{"prompt":"a","max_tokens":1'
END = b"1\r\n}\r\n0\r\n\r\n"
SPACE = b"1\r\n \r\n"


@pytest.fixture(scope="module")
def key(router: Router, keys: KeyFile) -> str:
    return known_key(router, keys.add("acme"))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer(router: Router, sent: bytes) -> bytes:
    with socket.create_connection(router.address, timeout=30) as sock:
        sock.sendall(sent)
        got = b""
        while b"}" not in got and (piece := sock.recv(1 << 16)):
            got += piece
    return got


def head(key: str) -> bytes:
    return HEAD.format(key).encode()


def refused(got: bytes) -> bool:
    return got.startswith(b"HTTP/1.1 400") and b'"param":"body"' in got and b"content-length" in got


def test_a_body_of_short_chunks_is_refused(router: Router, key: str) -> None:
    """32 such bodies kept every other request waiting for more than 6 s."""
    assert refused(answer(router, head(key) + chunk(BODY) + SPACE * 2 * MAX_SHORT_CHUNKS))


def test_without_a_key_it_is_refused_as_well(router: Router) -> None:
    """32 connections, each opened again when it was closed, delayed other requests by 2 s."""
    assert refused(answer(router, head("none") + SPACE * 2 * MAX_SHORT_CHUNKS))


def test_trailers_count_as_short_chunks(router: Router, key: str) -> None:
    assert refused(answer(router, head(key) + b"0\r\n" + b"a:\r\n" * 2 * MAX_SHORT_CHUNKS))


def test_requests_that_wait_share_the_bound(router: Router, key: str) -> None:
    """Sent at once, 64 requests would be read in one turn of the event loop."""
    one = head(key) + chunk(BODY) + SPACE * (MAX_SHORT_CHUNKS // 4) + END
    assert refused(answer(router, one * 8))


def test_some_short_chunks_and_many_longer_ones_are_served(router: Router, key: str) -> None:
    longer = chunk(b" " * SHORT_BYTES) * 2 * MAX_SHORT_CHUNKS
    sent = head(key) + chunk(BODY) + SPACE * (MAX_SHORT_CHUNKS // 2) + longer + END
    assert answer(router, sent).startswith(b"HTTP/1.1 200")


def test_bytes_that_arrive_one_by_one_are_no_chunks(router: Router, key: str) -> None:
    """A body of known length may arrive as slowly as its time allows."""
    body = BODY + b" " * 2 * MAX_SHORT_CHUNKS + b"}"
    start = head(key).replace(b"transfer-encoding: chunked", b"content-length: %d" % len(body))
    with socket.create_connection(router.address, timeout=30) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(start)
        for at in range(len(body)):
            sock.sendall(body[at : at + 1])
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_each_request_has_the_whole_bound(router: Router, key: str) -> None:
    one = head(key) + chunk(BODY) + SPACE * (MAX_SHORT_CHUNKS * 3 // 4) + END
    with socket.create_connection(router.address, timeout=30) as sock:
        for _ in range(3):
            sock.sendall(one)
            got = b""
            while b'"baton"' not in got and (piece := sock.recv(1 << 16)):
                got += piece
            assert got.startswith(b"HTTP/1.1 200"), got
