"""Tensor-parallel ranks, and KV that moves between workers of different degrees: the reference's tokens.

The cluster tests do the same with processes, sockets and digests for a few models; here every family takes every pair
of degrees, and the heads are cut by the functions that cut them there.
"""

from __future__ import annotations

import pytest

from engine.request import EngineRequest
from tests.engine.rank_parts import GREEDY, NEW, compute_prompt, move
from tests.engine.ranks import engine_of, run, runners
from tests.harness.checkpoints import EXPERTS, VARIANTS, prompt_ids, variants
from tests.harness.exactness import assert_greedy

DEGREES = [(1, 1), (1, 2), (2, 1), (2, 2)]


@pytest.mark.parametrize("variant", variants())
def test_two_ranks_give_the_output_of_one(variant, checkpoint):
    model = checkpoint(variant)
    with runners(model, 2) as ranks:
        heads = ranks[0].model_config.num_kv_heads
        assert [rank.kv_cache.shape[3] for rank in ranks] == [max(1, heads // 2)] * 2
        engine = engine_of(ranks[0])
        prompts = {str(i): prompt_ids(length, seed=i) for i, length in enumerate((70, 9))}
        outputs = run(engine, *(EngineRequest(name, prompt, GREEDY) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert_greedy("tensor-parallel", model, prompt, outputs.tokens[name, 0])


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize(
    "variant", variants(short=(), without=[one for one in VARIANTS if one not in EXPERTS])
)
def test_ranks_of_whole_experts_give_the_output_of_one(variant, tensor_parallel, checkpoint):
    """KV does not depend on how experts are shared, so any pair of workers may differ in it."""
    model, prompt = checkpoint(variant), prompt_ids(70)
    with runners(model, 1) as sources, runners(model, tensor_parallel, expert_parallel=True) as targets:
        prefill, decode = engine_of(sources[0]), engine_of(targets[0])
        first = compute_prompt(prefill, prompt)
        reservation = decode.reserve(EngineRequest("r", prompt, GREEDY), [], growth_tokens=NEW)
        move(sources, prefill.block_ids("r"), targets, reservation.block_ids, len(prompt))
        decode.commit("r", first)
        outputs = run(decode, EngineRequest("own", prompt_ids(50, seed=3), GREEDY))
        prefill.abort("r")
    assert_greedy("handed over, whole experts", model, prompt, [first[0].token_id, *outputs.tokens["r", 0]])
    assert_greedy("whole experts", model, prompt_ids(50, seed=3), outputs.tokens["own", 0])


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), DEGREES)
@pytest.mark.parametrize("variant", variants())
def test_kv_is_handed_over_between_any_degrees(variant, prefill_tp, decode_tp, checkpoint):
    model = checkpoint(variant)
    prompt = prompt_ids(70)
    with runners(model, prefill_tp) as sources, runners(model, decode_tp) as targets:
        prefill, decode = engine_of(sources[0]), engine_of(targets[0])
        first = compute_prompt(prefill, prompt)
        reservation = decode.reserve(EngineRequest("r", prompt, GREEDY), [], growth_tokens=NEW)
        assert reservation.held_tokens == 0
        move(sources, prefill.block_ids("r"), targets, reservation.block_ids, len(prompt))
        decode.commit("r", first)
        outputs = run(decode)
        prefill.abort("r")
        assert prefill.stats().blocks_held == 0
        assert decode.stats().prompt_tokens_computed == 0
    tokens = [first[0].token_id, *outputs.tokens["r", 0]]
    assert len(tokens) == NEW
    assert_greedy(f"handed over, TP {prefill_tp} to {decode_tp}", model, prompt, tokens)
