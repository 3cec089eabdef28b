"""Tensor-parallel ranks, and KV that moves between workers of different degrees: the reference's tokens.

The cluster tests do the same with processes, sockets and digests for a few models; here every family takes every pair
of degrees, and the heads are cut by the functions that cut them there.
"""

from __future__ import annotations

import secrets

import pytest
import torch

from engine.engine import Engine
from engine.request import EngineRequest, SamplingParams
from engine.runner import ModelRunner
from kv_transfer.layout.geometry import gather, plan_flows, scatter
from kv_transfer.layout.rows import Place
from tests.engine.ranks import engine_of, run, runners
from tests.harness.checkpoints import EXPERTS, VARIANTS, prompt_ids, variants
from tests.harness.exactness import assert_greedy

NEW = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
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


def compute_prompt(engine: Engine, prompt):
    """The first token; the request's blocks are held until it is released."""
    engine.add(EngineRequest("r", prompt, GREEDY, prefill_only=True))
    while True:
        if (step := engine.step()).tokens:
            return step.tokens


def move(sources: list[ModelRunner], from_blocks, targets: list[ModelRunner], to_blocks, count: int) -> None:
    """Part by part, as the wire carries them: each flow's heads of all layers, in two pieces, one cut inside a block."""
    config, page = sources[0].model_config, sources[0].page_size
    cut = count // 2 // page * page
    for flow in plan_flows(config.num_kv_heads, len(sources), len(targets), secrets.token_bytes(16)):
        source, target = sources[flow.source_rank], targets[flow.target_rank]
        for tokens in (range(cut), range(cut, count)):
            blocks = slice(tokens.start // page, -(-tokens.stop // page))
            size = len(tokens) * config.num_layers * 2 * (flow.head_end - flow.head_begin) * config.head_dim
            part = torch.empty(size)
            gather(
                source.kv_cache, part, Place(layers(source), heads(source, flow), tokens, from_blocks[blocks])
            )
            scatter(
                target.kv_cache, part, Place(layers(target), heads(target, flow), tokens, to_blocks[blocks])
            )


def layers(runner: ModelRunner) -> range:
    return range(runner.model_config.num_layers)


def heads(runner: ModelRunner, flow) -> range:
    """The flow's heads, counted from the rank's first."""
    begin, end = runner.kv_head_range
    assert begin <= flow.head_begin < flow.head_end <= end
    return range(flow.head_begin - begin, flow.head_end - begin)
