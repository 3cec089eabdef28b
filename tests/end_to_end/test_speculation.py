"""Speculation on a decode worker of a cluster: answers are the reference's, and drafts are accepted."""

from __future__ import annotations

import pytest

from baton.client import Client
from tests.end_to_end.handover import NEW, PROCESS, assert_all_free
from tests.harness.checkpoints import prompt_ids
from tests.harness.exactness import assert_greedy
from tests.harness.waiting import wait_for


@pytest.mark.long
@pytest.mark.parametrize("way", ["ngram", "draft model"])
def test_answers_with_drafts_are_the_references(checkpoint, start_cluster, way):
    """The draft model is the model itself."""
    model = checkpoint("llama")
    flags = ("--speculation", "ngram") if way == "ngram" else ("--draft-model", str(model))
    cluster = start_cluster(model, *PROCESS, *flags, "--speculative-tokens", "6")
    with Client(cluster.grpc) as client:
        for length in (70, 5, 129):
            prompt = prompt_ids(length)
            answer = client.generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True)
            assert_greedy("with drafts", model, prompt, answer.token_ids)
        # A bias makes an answer repeat itself, which a random model does not.
        one = client.generate(prompt_ids(20), max_tokens=NEW, temperature=0, logit_bias={7: 100})
        both = client.generate(prompt_ids(20), max_tokens=NEW, seed=1, logit_bias={7: 100, 8: 100})
    assert list(one.token_ids) == [7] * NEW and set(both.token_ids) == {7, 8}
    wait_for(
        lambda: cluster.status("decode").get("draft_tokens_accepted", 0) >= NEW // 2, 30.0, "accepted drafts"
    )
    assert cluster.status("prefill")["draft_tokens"] == 0
    assert_all_free(cluster)
