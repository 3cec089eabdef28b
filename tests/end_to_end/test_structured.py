"""Answers that match a grammar, through whole clusters."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from baton.client import Client
from tests.end_to_end.handover import NEW, PROCESS, pid_of
from tests.harness.checkpoints import prompt_ids
from tests.harness.schemas import schema_of, validate

WORDS = {"type": "array", "items": {"enum": ["alpha", "beta", 1, None]}, "minItems": 150, "maxItems": 150}


def answers(cluster: Any, schemas: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    found = []
    with Client(cluster.grpc) as client:
        for seed, schema in enumerate(schemas):
            answer = client.generate(
                prompt_ids(40 + seed, seed=seed),
                max_tokens=300,
                seed=seed,
                json_schema=schema,
                min_tokens=NEW,
            )
            assert answer.finish_reason == "stop"
            validate(answer.text, schema)
            found.append(answer.token_ids)
    return found


@pytest.mark.long
def test_answers_are_valid_wherever_they_are_computed(checkpoint, start_cluster):
    """Handed over, by one worker alone, and after the decode worker was killed: the same tokens."""
    model, schemas = checkpoint("llama"), [schema_of(seed) for seed in range(10)]
    cluster = start_cluster(model, *PROCESS, "--prefill", "2", "--decode", "2")
    handed_over = answers(cluster, schemas)
    prompt = prompt_ids(60, seed=9)
    options: dict[str, Any] = {"max_tokens": 900, "seed": 5, "json_schema": WORDS}
    with Client(cluster.grpc) as client:
        undisturbed = client.generate(prompt, **options)
        assert undisturbed.timings.kv_bytes_shipped > 0 and undisturbed.finish_reason == "stop"
        stream = client.stream(prompt, **options)
        chunks = [next(stream) for _ in range(5)]
        os.kill(pid_of(cluster, "decode", stream.worker_ids), signal.SIGKILL)
        chunks += list(stream)
        answer = stream.completion()
    assert answer.timings.attempts == 2
    assert answer.token_ids == undisturbed.token_ids
    validate(answer.text, WORDS)
    alone = start_cluster(model, *PROCESS, "--local-prefill", "always")
    assert answers(alone, schemas) == handed_over
