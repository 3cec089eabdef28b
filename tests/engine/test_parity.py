"""Greedy tokens and logits identical to Hugging Face in fp32, for every family and every way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from cluster.config import EngineConfig
from engine.build import load_runner
from engine.engine import Engine
from engine.plan import PlanItem, StepPlan
from engine.request import EngineRequest, FinishReason, SamplingParams
from tests.checkpoints import VARIANTS, near_ties, prompt_ids, reference_greedy, reference_logits

NEW = 48
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)


def make_engine(model: Path, *, blocks: int = 0, **config: object) -> Engine:
    settings = EngineConfig(model=model, dtype="float32", kv_memory_bytes=64 << 20, **config)  # type: ignore[arg-type]
    runner = load_runner(settings)
    if blocks:
        runner.num_blocks = blocks
    return Engine(runner, runner.config, secret=b"test")


@dataclass
class Outputs:
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)


def run(engine: Engine, *requests: EngineRequest) -> Outputs:
    for request in requests:
        engine.add(request)
    outputs = Outputs()
    for _ in range(5000):
        if not engine.has_work:
            break
        step = engine.step()
        engine.check_integrity()
        for token in step.tokens:
            outputs.tokens.setdefault((token.request_id, token.choice), []).append(token.token_id)
        for done in step.done:
            outputs.cached[done.request_id] = done.cached_tokens
    assert not engine.has_work
    assert engine.stats().blocks_held == 0
    return outputs


def assert_same(model: Path, prompt: list[int], got: list[int], already: int = 0) -> None:
    expected = reference_greedy(model, prompt, NEW)[already:]
    if got != expected:
        first = next(i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1])
        assert first + already in near_ties(model, prompt, expected), f"differs at {first}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_the_references_however_the_prompt_is_cut(variant, checkpoint):
    model = checkpoint(variant)
    tokens = prompt_ids(90)
    expected = reference_logits(model, tokens)
    settings = EngineConfig(model=model, dtype="float32", kv_memory_bytes=64 << 20)
    runner = load_runner(settings)
    blocks = [5, 2, 9, 1, 30, 7]
    begin = 0
    for end in (1, 16, 45, 46, 90):
        item = PlanItem("r", tokens[begin:end], begin, blocks, wants_logits=True)
        logits = runner.execute(StepPlan([item], []))
        torch.testing.assert_close(logits[0], expected[end - 1], atol=1e-4, rtol=1e-4)
        begin = end


@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_and_chunked_prompts_in_one_batch(variant, checkpoint):
    model = checkpoint(variant)
    engine = make_engine(model, max_batch_tokens=32)
    prompts = {str(i): prompt_ids(length, seed=i) for i, length in enumerate((70, 9, 33, 16))}
    outputs = run(engine, *(EngineRequest(name, prompt, GREEDY) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert_same(model, prompt, outputs.tokens[name, 0])
    assert engine.stats().prefill_chunks >= 4


@pytest.mark.parametrize("variant", ["qwen3", "mistral"])
@pytest.mark.parametrize(("backend", "threads"), [("sdpa", 1), ("cpu", 2)])
def test_other_forms_of_the_engine_say_the_same(variant, backend, threads, checkpoint):
    model = checkpoint(variant)
    engine = make_engine(model, attention_backend=backend, threads=threads, max_batch_tokens=100)
    prompts = {str(i): prompt_ids(length, seed=i) for i, length in enumerate((70, 110, 5))}
    outputs = run(engine, *(EngineRequest(name, prompt, GREEDY) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert_same(model, prompt, outputs.tokens[name, 0])


def test_a_cached_prefix_changes_nothing(checkpoint):
    model = checkpoint("qwen3")
    engine = make_engine(model)
    prompt = prompt_ids(70)
    run(engine, EngineRequest("first", prompt, GREEDY))
    again = run(engine, EngineRequest("again", prompt, GREEDY))
    assert_same(model, prompt, again.tokens["again", 0])
    assert again.cached["again"] == 64
    assert engine.stats().prompt_tokens_computed == 70 + 6


def test_a_prompt_is_never_a_full_hit(checkpoint):
    model = checkpoint("llama")
    engine = make_engine(model)
    prompt = prompt_ids(64)
    run(engine, EngineRequest("first", prompt, GREEDY))
    again = run(engine, EngineRequest("again", prompt, GREEDY))
    assert again.cached["again"] == 48
    assert_same(model, prompt, again.tokens["again", 0])


@pytest.mark.parametrize("variant", ["llama", "mistral"])
def test_preempted_requests_go_on_as_if_nothing_had_happened(variant, checkpoint):
    model = checkpoint(variant)
    # Room for one whole request and a bit: three at once must push each other out.
    engine = make_engine(model, blocks=12, max_model_len=192)
    prompts = {str(i): prompt_ids(40, seed=10 + i) for i in range(3)}
    outputs = run(engine, *(EngineRequest(name, prompt, GREEDY) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert_same(model, prompt, outputs.tokens[name, 0])
    assert engine.stats().preemptions > 0


def test_a_resumed_request_continues_where_it_was(checkpoint):
    model = checkpoint("qwen2")
    prompt = prompt_ids(50)
    already = reference_greedy(model, prompt, 20)
    engine = make_engine(model)
    outputs = run(engine, EngineRequest("r", prompt, GREEDY, output_tokens=already))
    assert_same(model, prompt, outputs.tokens["r", 0], already=20)
    assert len(outputs.tokens["r", 0]) == NEW - 20


def test_choices_share_their_prompt_and_all_equal_the_reference(checkpoint):
    model = checkpoint("llama")
    engine = make_engine(model)
    prompt = prompt_ids(37)
    outputs = run(engine, EngineRequest("r", prompt, GREEDY, n=4))
    for choice in range(4):
        assert_same(model, prompt, outputs.tokens["r", choice])
    assert engine.stats().prompt_tokens_computed == 37


def test_reserved_blocks_are_taken_over_and_given_back(checkpoint):
    engine = make_engine(checkpoint("llama"))
    prompt = prompt_ids(40)
    total = engine.stats().blocks_total
    reservation = engine.reserve(EngineRequest("r", prompt, GREEDY), [], growth_tokens=20)
    assert reservation.held_tokens == 0
    assert len(reservation.block_ids) == 4
    assert engine.stats().waiting_for_kv == 1
    assert engine.abort("r")
    assert engine.stats().blocks_free == total
    engine.check_integrity()


def test_stop_tokens_and_limits_say_why(checkpoint):
    model = checkpoint("llama")
    prompt = prompt_ids(30)
    reference = reference_greedy(model, prompt, 8)
    stop = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(reference[3],))
    engine = make_engine(model)
    engine.add(EngineRequest("r", prompt, stop))
    tokens = []
    while engine.has_work:
        tokens += engine.step().tokens
    first = reference.index(reference[3])
    assert [t.token_id for t in tokens] == reference[: first + 1]
    assert tokens[-1].finish is FinishReason.STOP
