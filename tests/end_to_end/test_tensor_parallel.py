"""Any pair of tensor-parallel degrees: heads are re-sharded in the hand-off, tokens equal the reference's."""

from __future__ import annotations

import pytest

from baton.client import Client
from tests.end_to_end.handover import NEW, PROCESS, assert_all_free, assert_reference
from tests.harness.checkpoints import prompt_ids

# (variant, prefill ranks, decode ranks). llama-mqa-tied has one KV head: it is replicated where TP is 2.
CASES = [
    ("mistral", 1, 2),
    pytest.param("qwen3", 2, 1, marks=pytest.mark.long),
    pytest.param("qwen2-window", 2, 2, marks=pytest.mark.long),
    pytest.param("llama-mqa-tied", 1, 2, marks=pytest.mark.long),
    pytest.param("llama-mqa-tied", 2, 1, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("variant", "prefill", "decode"), CASES)
def test_heads_are_resharded(variant, prefill, decode, checkpoint, start_cluster):
    model = checkpoint(variant)
    flags = ("--prefill-tp", str(prefill), "--decode-tp", str(decode))
    cluster = start_cluster(model, *PROCESS, *flags)
    with Client(cluster.grpc) as client:
        for length in (70, 70, 133):
            prompt = prompt_ids(length)
            answer = client.generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True)
            assert_reference(model, prompt, answer.token_ids)
            assert answer.timings.kv_bytes_shipped > 0
    assert cluster.status("decode")["prompt_tokens_computed"] == 0
    assert_all_free(cluster)
