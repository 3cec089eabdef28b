"""A cluster whose prefix index has a Redis of its own: prefixes are found, and no request fails while it is away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from baton.client import Client
from cluster.redis.embedded import EmbeddedRedis
from tests.end_to_end.handover import PROCESS, assert_all_free, assert_reference
from tests.harness.checkpoints import prompt_ids
from tests.harness.waiting import wait_for

SECONDS = 60.0


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def server(directory: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis.start(directory)
    yield server
    server.stop()


@pytest.mark.long
def test_prefixes_are_found_before_and_after_the_index_was_killed(
    checkpoint, start_cluster, server, directory
):
    model = checkpoint("llama")
    cluster = start_cluster(model, *PROCESS, "--index-url", server.url, "--prefill", "2", "--decode", "2")
    with Client(cluster.grpc) as client:

        def ask(seed: int) -> int:
            """Tokens that no worker computed; the answer is checked."""
            prompt = prompt_ids(100, seed=seed)
            answer = client.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True)
            assert_reference(model, prompt, answer.token_ids)
            return int(answer.usage.cached_tokens)

        ask(1)
        assert ask(1) >= 96
        with redis.Redis.from_url(cluster.state["redis"]["url"]) as control:
            assert control.keys("*:index:*") == []
        server.process.kill()
        server.process.wait(10)
        for seed in range(2, 8):
            ask(seed)
        back = EmbeddedRedis.start(directory)  # empty
        try:
            with redis.Redis.from_url(back.url) as index:
                wait_for(lambda: index.keys("*:index:*:w:*"), SECONDS, "workers have published their caches")
            wait_for(
                lambda: all(ask(seed) >= 96 for seed in range(1, 4)), SECONDS, "prefixes are found again"
            )
            assert_all_free(cluster)
        finally:
            back.stop()
