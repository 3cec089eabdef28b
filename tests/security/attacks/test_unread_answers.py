"""Answers that are not read: their connections make room for others, and hold few bytes of the requests behind them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from router.frontends.http.protocol import MAX_REFUSED
from tests.harness.router import KeyFile, Router
from tests.harness.waiting import wait_for

LIMIT = 60
PAGE = b"GET /ui/style.css HTTP/1.1\r\nhost: x\r\n\r\n"
DOCUMENT = "GET /openapi.json HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n\r\n"
FITTING, PAGES = 40, 60  # what the kernel's and the router's buffers of a connection take, and more
BODY = bytes(60_000)
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
POSTS = 36
CONNECTIONS = 25
GROWN_MIB = 10  # it was 48
STREAM_KIB = 512


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return {"max_http_connections": LIMIT}


@pytest.fixture(scope="module")
def greedy(keys: KeyFile) -> str:
    return keys.add("greedy", max_concurrent_requests=1)


@pytest.fixture(scope="module")
def key(keys: KeyFile) -> str:
    return keys.add("acme")


def ask(router: Router, key: str) -> int:
    body = {"prompt": "abc", "max_tokens": 2}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{router.http}/v1/completions", json=body, headers=headers, timeout=10).status_code


@contextlib.contextmanager
def unread(router: Router, count: int, *parts: bytes) -> Iterator[None]:
    """Connections without a key whose answers are not read. They send the first part, then the second, and so on, each as
    much as the router takes."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.settimeout(0.3)
            with contextlib.suppress(OSError):
                sock.connect(router.address)
            sockets.append(sock)
        for part in parts:
            for sock in sockets:
                with contextlib.suppress(OSError):  # closed: the oldest make room, or not read any more
                    sock.sendall(part)
            time.sleep(0.5)
        yield


@pytest.mark.long
def test_unread_answers_under_one_key_close_the_port_to_no_client(
    router: Router, key: str, greedy: str
) -> None:
    """Requests other than generations take no place, of which that key has one."""
    for one in (key, greedy):
        wait_for(lambda one=one: ask(router, one) == 200, 30, "the key is known")
    with unread(router, LIMIT + MAX_REFUSED + 40, (DOCUMENT % greedy).encode() * FITTING):
        assert [ask(router, key) for _ in range(10)] == [200] * 10


def test_unread_answers_without_a_key_close_the_port_to_no_client(router: Router, key: str) -> None:
    wait_for(lambda: ask(router, key) == 200, 30, "the key is known")
    with unread(router, LIMIT + MAX_REFUSED + 40, PAGE * FITTING, PAGE * PAGES):
        assert [ask(router, key) for _ in range(10)] == [200] * 10


def test_requests_behind_an_unread_answer_hold_few_bytes(router: Router, key: str) -> None:
    wait_for(lambda: ask(router, key) == 200, 30, "the key is known")
    process = psutil.Process(router.pid)
    before = process.memory_info().rss
    with unread(router, CONNECTIONS, PAGE * FITTING, PAGE * (PAGES - FITTING) + POST * POSTS):
        grown = (process.memory_info().rss - before) >> 20
        assert ask(router, key) == 200
    assert grown < GROWN_MIB, f"{grown} MiB"


def test_streams_that_are_not_read_hold_few_bytes(router: Router, key: str) -> None:
    """The router grants a stream's worker no further token while its client does not read."""
    wait_for(lambda: ask(router, key) == 200, 30, "the key is known")
    most = httpx.get(f"{router.http}/v1/models", headers={"authorization": f"Bearer {key}"}).json()
    tokens = most["data"][0]["max_model_len"] - 8
    body = b'{"prompt":[5],"stream":true,"max_tokens":%d,"logprobs":5}' % tokens
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n"
    )
    process = psutil.Process(router.pid)
    before = process.memory_info().rss
    with unread(router, CONNECTIONS, head % (key.encode(), len(body)) + body):
        time.sleep(1.0)
        grown = (process.memory_info().rss - before) >> 10
        assert ask(router, key) == 200
    assert grown / CONNECTIONS <= STREAM_KIB, f"{grown / CONNECTIONS:.0f} KiB"
