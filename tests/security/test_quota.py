"""A key with quotas, over HTTP and gRPC of a real router."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from baton.client import Client
from cluster.errors import OverloadedError
from tests.harness.waiting import wait_for

BODY = {"prompt": "abc", "max_tokens": 4}


@pytest.fixture(scope="module")
def named(keys: Any) -> dict[str, str]:
    return {
        "few": keys.add("few", requests_per_minute=2),
        "short": keys.add("short", tokens_per_minute=300),
        "free": keys.add("free"),
        "both": keys.add("both", requests_per_minute=60, tokens_per_minute=300),
        "two": keys.add("two", max_concurrent_requests=2, requests_per_minute=1),
        "one": keys.add("one", requests_per_minute=1),
        "low": keys.add("low", requests_per_minute=1),
        "ops": keys.add("ops", admin=True),
    }


def ask(router: Any, key: str, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{router.http}/v1/completions", json={**BODY, **more}, headers=headers, timeout=30)


def test_more_requests_than_a_minute_allows_are_refused_with_a_time(named, router):
    answers = [ask(router, named["few"]) for _ in range(6)]
    assert [one.status_code for one in answers].count(200) >= 2
    refused = answers[-1]
    assert refused.status_code == 429
    assert refused.json()["error"]["param"] == "requests_per_minute"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    with Client(router.grpc, api_key=named["few"]) as client, pytest.raises(OverloadedError) as caught:
        client.generate("abc", max_tokens=1)
    assert caught.value.field == "requests_per_minute"
    assert 1 < caught.value.retry_after_seconds <= 30
    assert ask(router, named["free"]).status_code == 200
    metrics = httpx.get(f"{router.http}/metrics", headers={"authorization": f"Bearer {named['ops']}"}).text
    assert 'baton_quota_refused_total{limit="requests_per_minute"}' in metrics


def test_tokens_a_minute_are_settled(named, router):
    """Expected to use 259 of 300 tokens, it uses 403: by the estimate alone the next would wait 44 s, not 72."""
    assert ask(router, named["short"], max_tokens=400).status_code == 200

    def settled() -> bool:
        refused = ask(router, named["short"], max_tokens=400)
        assert refused.status_code == 429 and refused.json()["error"]["param"] == "tokens_per_minute"
        return 45 < int(refused.headers["retry-after"]) <= 73

    wait_for(settled, 60, "what was used is charged")


def test_requests_without_tokens_do_not_clear_those_that_are_used_up(named, router):
    """Tokenize, and a request that is refused once its prompt is tokenised, are charged as requests only."""

    def used_up() -> bool:
        answer = ask(router, named["both"], max_tokens=400)
        return answer.status_code == 429 and answer.json()["error"]["param"] == "tokens_per_minute"

    assert ask(router, named["both"], max_tokens=400).status_code == 200
    wait_for(used_up, 60, "what was used is charged")
    with Client(router.grpc, api_key=named["both"]) as client:
        assert client.tokenize("abc")
    assert used_up()
    assert ask(router, named["both"], max_tokens=1 << 20).status_code == 400
    assert used_up()


@pytest.mark.parametrize(
    ("name", "wrong", "status"),
    [("one", {"max_tokens": 1 << 20}, 400), ("low", {"priority": "high"}, 403)],
)
def test_a_request_refused_after_it_was_tokenised_is_counted(name, wrong, status, named, router):
    answers = [ask(router, named[name], **wrong) for _ in range(3)]
    assert [one.status_code for one in answers] == [status, 429, 429]
    assert {one.json()["error"]["param"] for one in answers[1:]} == {"requests_per_minute"}


def test_a_request_refused_before_it_is_tokenised_is_not_counted(named, router, keys):
    key = keys.add("careless", requests_per_minute=1)
    wait_for(lambda: ask(router, key, temperature=1e9).status_code != 401, 30, "the key is known")
    for wrong in ({"temperature": 1e9}, {"prompts": 3}):
        assert {ask(router, key, **wrong).status_code for _ in range(3)} == {400}
    assert ask(router, key).status_code == 200


def test_prompts_that_have_no_place_are_not_tokenised(named, router):
    """Else a tenant has them tokenised as often as it likes: a request without a place costs nothing of its quota."""
    too_long = "x" * 1_000_000  # refused by its length, once it is its turn to be tokenised
    refused = ask(router, named["two"], prompt=[too_long, "b", "c"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (429, "tenant")
    assert ask(router, named["two"], prompt=[too_long, "b"]).status_code == 400
