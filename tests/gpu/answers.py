"""Answers of engines on the GPU and on the CPU, and how they are compared."""

from __future__ import annotations

from cluster.config.worker import EngineConfig
from engine.build import load_model
from engine.engine import Engine
from engine.plan import PlanItem, StepPlan
from engine.request import EngineRequest, SamplingParams
from engine.runner import ModelRunner

NEW = 32
TIE = 1e-3  # between logits of magnitude 10 in fp32
KV_BYTES = 256 << 20


def runner_of(model, **settings) -> ModelRunner:
    return ModelRunner(load_model(EngineConfig(model=model, kv_memory_bytes=KV_BYTES, **settings)))


def generate(model, prompts, **settings):
    runner = runner_of(model, **settings)
    engine = Engine(runner, runner.config, secret=b"gpu")
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(index), prompt, greedy))
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for token in engine.step().tokens:
            tokens.setdefault(token.request_id, []).append(token.token_id)
    return [tokens[str(index)] for index in range(len(prompts))]


def same_but_for_ties(path, prompts, found, expected) -> None:
    """Where answers part, the CPU's logits of both tokens must be as near as sums in another order can move them. What
    follows is not compared."""
    for prompt, one, other in zip(prompts, found, expected, strict=True):
        parted = next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
        if parted is None:
            continue
        runner = runner_of(path, device="cpu", dtype="float32", attention_backend="sdpa")
        tokens = [*prompt, *other[:parted]]
        blocks = list(range(-(-len(tokens) // runner.page_size)))
        (row,) = runner.execute(StepPlan([PlanItem("judge", tokens, 0, blocks, 0, 1)], []))
        between = abs(float(row[one[parted]] - row[other[parted]]))
        assert between <= TIE, f"token {parted}: {one[parted]} and {other[parted]} are {between} apart"
