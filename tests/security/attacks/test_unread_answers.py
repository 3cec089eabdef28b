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

from router.frontends.http.connection.protocol import MAX_REFUSED
from router.frontends.http.gate import GENERATE
from tests.harness.router import KeyFile, Router
from tests.harness.waiting import wait_for
from tests.security.attacks.endpoints import ENDPOINTS, PATHS
from tests.security.attacks.places_in_use import in_flight

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
TEMPLATE_TOKENS = 200  # more than a chat template adds to one letter
MAX_BODY = 1 << 20  # also all that one tenant may have of bodies and unread answers
# More than 1.5 MB; the kernel and the router's buffer take 0.4 of it.
LARGE = b'{"prompt":[5],"n":8,"max_tokens":740,"ignore_eos":true,"logprobs":20}'
HEAD = b"POST %s HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return {
        "max_http_connections": LIMIT,
        "max_body_bytes": MAX_BODY,
        "max_body_bytes_in_flight_per_tenant": 0,
    }


def test_every_endpoint_is_in_the_table() -> None:
    assert {*PATHS} == GENERATE


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


def test_whole_answers_that_are_not_read_are_counted(router: Router, keys: KeyFile, key: str) -> None:
    """They had no place and no budget: an echo of 100 KB had 12 MiB held on each connection of a key."""
    many, ops = keys.add("many"), keys.add("ops", admin=True)
    headers, url = {"authorization": f"Bearer {many}"}, f"{router.http}/v1/completions"
    wait_for(lambda: ask(router, many) == ask(router, ops) == ask(router, key) == 200, 30, "known")
    with unread(router, 1, HEAD % (b"/v1/completions", many.encode(), len(LARGE)) + LARGE):

        def refused() -> bool:
            answer = httpx.post(url, content=LARGE, headers=headers, timeout=30)
            return answer.status_code == 429 and answer.json()["error"]["param"] == "body"

        wait_for(refused, 10, "no room is left for a second one")
        assert in_flight(router, ops) == 1
        assert ask(router, many) == 200, "short answers are not counted"
        assert httpx.post(
            url, content=LARGE, headers={"authorization": f"Bearer {key}"}, timeout=30
        ).is_success
    wait_for(lambda: in_flight(router, ops) == 0, 10, "it is free")
    assert httpx.post(url, content=LARGE, headers=headers, timeout=30).is_success


@pytest.mark.parametrize(
    "name",
    [
        one if one == "completion" else pytest.param(one, marks=pytest.mark.long)
        for one, endpoint in ENDPOINTS.items()
        if endpoint.streams
    ],
)
def test_streams_that_are_not_read_hold_few_bytes(name: str, router: Router, keys: KeyFile, key: str) -> None:
    """The router grants a stream's worker no further token while its client does not read."""
    ops = keys.add(f"ops-{name}", admin=True)
    headers = {"authorization": f"Bearer {key}"}
    wait_for(lambda: ask(router, key) == ask(router, ops) == 200, 30, "the keys are known")
    most = httpx.get(f"{router.http}/v1/models", headers=headers).json()["data"][0]["max_model_len"]
    asked = ENDPOINTS[name]
    most_tokens = "max_output_tokens" if name == "response" else "max_tokens"
    more = {"completion": {"logprobs": 5}, "chat": {"logprobs": True, "top_logprobs": 5}}.get(name, {})
    body = asked.body("a", stream=True, ignore_eos=True, **{most_tokens: most - TEMPLATE_TOKENS}, **more)
    with httpx.stream("POST", router.http + asked.path, content=body, headers=headers) as answer:
        assert answer.status_code == 200, "a stream and no refusal is what is not read"
    wait_for(lambda: in_flight(router, ops) == 0, 10, "it is cancelled")
    process = psutil.Process(router.pid)

    def state() -> tuple[int, float]:
        return process.memory_info().rss >> 20, in_flight(router, ops)

    def settled() -> bool:
        earlier = state()
        time.sleep(0.5)
        return state() == earlier

    before = process.memory_info().rss
    with unread(router, CONNECTIONS, HEAD % (asked.path.encode(), key.encode(), len(body)) + body):
        wait_for(settled, 30, "all that will be buffered is")
        grown = (process.memory_info().rss - before) >> 10
        assert ask(router, key) == 200
    assert grown / CONNECTIONS <= STREAM_KIB, f"{grown / CONNECTIONS:.0f} KiB"
