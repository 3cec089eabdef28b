"""Small requests for large answers: their limits, and their cost for others."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from baton.client import Client
from cluster.errors import InvalidRequestError
from tests.harness.router import Router
from tests.security.attacks.probe import probed

# Processor time of one turn of the event loop; making an answer at its end took 0.55 s.
STALL_SECONDS = 0.25
MOST = 1 << 18
LARGE = {"n": 16, "max_tokens": 740, "ignore_eos": True}


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return {"api_keys_file": None}


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20},
    ),
    "completion": ("completions", {"prompt": "a", "logprobs": 20}),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_large_answer_delays_no_other_request(name: str, stream: bool, router: Router) -> None:
    path, fields = BODIES[name]
    body = {**fields, **LARGE, "stream": stream}
    with probed(router.http, router.pid) as probe:
        answer = httpx.post(f"{router.http}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert len(answer.content) > 3_000_000
    assert 0 < probe.most_work < STALL_SECONDS


TOO_MUCH: list[dict[str, Any]] = [
    {"prompt": "a", "n": 16, "max_tokens": 900, "logprobs": 20},
    {"prompt": ["a"] * 64, "n": 16, "max_tokens": 300},
    {"prompt": ["a"] * 64, "max_tokens": 900, "logprobs": 5},
]


@pytest.mark.parametrize("body", TOO_MUCH)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_may_not_ask_for_more(body: dict[str, Any], stream: bool, router: Router) -> None:
    answer = httpx.post(f"{router.http}/v1/completions", json={**body, "stream": stream}, timeout=60)
    assert answer.status_code == 400, f"{len(answer.content)} bytes"
    error = answer.json()["error"]
    assert error["param"] == "max_tokens" and str(MOST) in error["message"]


def test_a_grpc_request_may_not_ask_for_more_either(router: Router) -> None:
    with Client(router.grpc) as client, pytest.raises(InvalidRequestError) as caught:
        client.generate("a", n=16, max_tokens=900, logprobs=20)
    assert (caught.value.field, caught.value.limit) == ("max_tokens", str(MOST))


def test_without_max_tokens_answers_end_there(router: Router) -> None:
    path, fields = BODIES["chat"]
    answer = httpx.post(f"{router.http}/v1/{path}", json={**fields, "n": 16}, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 16 * (MOST // (16 * 21))
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
