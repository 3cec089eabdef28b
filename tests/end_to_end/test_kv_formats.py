"""KV in int8 crosses processes, rounded before or after, also between other degrees of tensor parallelism."""

from __future__ import annotations

import pytest

from baton.client import Client
from cluster.protocol.kv_format import row_bytes
from engine.model.config import ModelConfig
from engine.request import EngineRequest, SamplingParams
from tests.end_to_end.handover import assert_all_free
from tests.engine.ranks import make_engine, run
from tests.harness.checkpoints import prompt_ids

pytestmark = pytest.mark.long
NEW = 24
FLAGS = ("--pool", "process", "--local-prefill", "fallback", "--kv-memory", "64MiB")


def shipped_bytes(model, tokens: int, kv_dtype: str) -> int:
    config = ModelConfig.read(model)
    return tokens * config.num_layers * 2 * config.num_kv_heads * row_bytes(kv_dtype, config.head_dim)


def test_a_hand_off_in_int8_gives_the_tokens_of_one_worker(checkpoint, start_cluster) -> None:
    model, prompt = checkpoint("llama"), prompt_ids(70)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    expected = run(make_engine(model, kv_dtype="int8"), EngineRequest("r", prompt, greedy)).tokens["r", 0]
    how = ("--dtype", "float32", "--kv-dtype", "int8", "--decode-tp", "2")
    cluster = start_cluster(model, *FLAGS, *how)
    with Client(cluster.grpc) as client:
        answer = client.generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True)
    assert list(answer.token_ids) == expected
    assert answer.timings.kv_bytes_shipped == shipped_bytes(model, len(prompt), "int8")
    assert_all_free(cluster)


def test_a_decode_worker_converts_and_both_roles_share_prefixes(checkpoint, start_cluster) -> None:
    model, prompt = checkpoint("llama"), prompt_ids(70)
    cluster = start_cluster(model, *FLAGS, "--dtype", "bfloat16", "--kv-dtype", "bf16>int8")
    with Client(cluster.grpc) as client:
        first, again = (
            client.generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True) for _ in range(2)
        )
    assert first.timings.kv_bytes_shipped == shipped_bytes(model, len(prompt), "bfloat16")
    assert again.timings.not_shipped_tokens == 64, "the decode worker keeps what it has converted"
    assert again.usage.cached_tokens == 64
    assert len(first.token_ids) == NEW and list(again.token_ids) == list(first.token_ids)
    assert_all_free(cluster)
