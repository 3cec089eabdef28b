"""Every packet to and from Redis is lost for a while, with connections that stay open: only placement is affected."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator

import pytest

from baton.client import Client
from cluster.redis.embedded import EmbeddedRedis
from tests.end_to_end.handover import PROCESS, assert_all_free, assert_reference
from tests.harness.bounds import PLACEMENT_BACK_SECONDS, allowed
from tests.harness.checkpoints import prompt_ids
from tests.harness.run_proxy import RunningProxy, run_proxy
from tests.harness.waiting import wait_for

CUT_SECONDS = 6.0  # at least: leases run out meanwhile
LONGEST_CUT_SECONDS = 60.0  # where requests are slow: a busy machine is no failure
MIN_WITHOUT = 4  # requests that are placed without Redis


@pytest.fixture
def network(tmp_path) -> Iterator[RunningProxy]:
    server = EmbeddedRedis.start(tmp_path / "redis")
    try:
        with run_proxy(server.url.removeprefix("unix://")) as proxy:
            yield proxy
    finally:
        server.stop()


@pytest.mark.long
def test_lost_packets_fail_no_request_and_placement_is_back_at_once(checkpoint, start_cluster, network):
    model = checkpoint("llama")
    url = f"redis://{network.address}/0"
    cluster = start_cluster(model, *PROCESS, "--redis-url", url, "--prefill", "2", "--decode", "2")
    with Client(cluster.grpc) as client:
        answers: list[tuple[list[int], list[int]]] = []

        def ask(seed: int) -> bool:
            """Whether Redis placed it. The reference is computed later: it would take the time that recovery has."""
            prompt = prompt_ids(50, seed=seed)
            answer = client.generate(prompt, max_tokens=12, temperature=0, ignore_eos=True, explain=True)
            answers.append((prompt, list(answer.token_ids)))
            return bool(json.loads(answer.explanation)[0]["from_redis"])

        assert ask(1)
        assert network.cut() > 0
        began, without = time.monotonic(), 0
        while time.monotonic() - began < CUT_SECONDS or without < MIN_WITHOUT:
            without += not ask(2 + without % 5)
            assert time.monotonic() - began < LONGEST_CUT_SECONDS, f"{without} requests placed without Redis"
        network.heal()
        began = time.monotonic()
        wait_for(
            lambda: ask(9) and view_is_whole(cluster.http),
            allowed(PLACEMENT_BACK_SECONDS),
            "Redis places again",
        )
        print(f"placement back after {time.monotonic() - began:.2f} s")
    assert_all_free(cluster)
    for prompt, tokens in answers:
        assert_reference(model, prompt, tokens)


def view_is_whole(http: str) -> bool:
    with urllib.request.urlopen(f"{http}/v1/cluster", timeout=10) as answer:
        view = json.load(answer)
    return bool(view["redis"]["ok"]) and [w["lease"] for w in view["workers"]] == ["live"] * 4
