"""Heads without bodies under one key: they take half of the places, and the router counts what they hold."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import httpx
import pytest

from tests.harness.router import KeyFile, Router, known_key
from tests.harness.waiting import wait_for
from tests.security.attacks.places_in_use import bearer, in_flight

PLACES = 8


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return {"max_concurrent_requests": PLACES}


@pytest.mark.long
def test_one_key_does_not_take_every_place(router: Router, keys: KeyFile) -> None:
    greedy, other, ops = keys.add("greedy"), keys.add("other"), keys.add("ops", admin=True)

    def ask(key: str = other) -> int:
        body = {"prompt": "abc", "max_tokens": 2}
        return httpx.post(
            f"{router.http}/v1/completions", json=body, headers=bearer(key), timeout=10
        ).status_code

    for key in (greedy, other, ops):
        known_key(router, key)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {greedy}\r\ncontent-length: 9\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(PLACES + 2):
            sock = stack.enter_context(socket.create_connection(router.address, timeout=10))
            sock.sendall(head.encode())
        wait_for(lambda: in_flight(router, ops) == PLACES // 2, 10, "the metric shows the places")
        assert [ask() for _ in range(5)] == [200] * 5
    wait_for(lambda: in_flight(router, ops) == 0, 10, "all places are free")
