"""Decode of one request with speculation beside decode without, on one thread, in alternating pairs.

A bias makes the model repeat one token, and each draft of a scripted proposer is right with probability α. So the speed-up
depends on α and the number of drafts alone. (Without the bias a random model's streams diverge at near-ties of bf16,
because products of one row and of several round differently.) τ is the number of tokens per step; beside it stands
(1 − α^(γ+1)) / (1 − α), which γ drafts in every step would give.

In random text prompt lookup finds little, and it should cost nothing there.

With a draft model the drafts cost time too: those of a model with a twentieth of the weights are computed, and replaced by
scripted tokens.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.checkpoint import ModelShape, write
from bench.figures import Figure, Section
from bench.pairs.ratios import interval
from bench.sections.engine import load

if TYPE_CHECKING:
    from bench.context import Context  # which a machine for gpu-check lacks a package for

PAIRS = 7
PROMPT, TOKENS = 64, 96
DRAFTS = 4
REPEATED = 7  # the token that the bias makes the model repeat
CASES = {0.6: "", 0.8: "≥ 1.8", 0.9: "≥ 1.8", 1.0: "≥ 1.8"}  # α → target
DRAFT_SHAPE = ModelShape(layers=2, hidden=512, heads=8, kv_heads=4, head_dim=64, intermediate=1408)


class Request(NamedTuple):
    prompt: list[int]
    bias: dict[int, float]


class Case(NamedTuple):
    name: str
    request: Request
    method: Callable[[], Any]
    bound: str = ""
    tau: str = ""


class Script:
    """Tokens that are right with probability `right`."""

    def __init__(self, right: float):
        self._right = right
        self._source = random.Random(1)

    def tokens(self, count: int) -> list[int]:
        return [REPEATED if self._source.random() < self._right else REPEATED + 1 for _ in range(count)]

    def propose(self, tokens: list[int], count: int) -> list[int]:
        return self.tokens(count)


def run(context: Context) -> Section:
    draft = write(context.model.parent / "draft", DRAFT_SHAPE)
    figures = measure(context.model, "cpu", draft, context.repeats(PAIRS))
    return Section("speculation", f"Speculation, up to {DRAFTS} drafts, batch 1", figures)


def measure(model: Path, device: str, draft_model: Path, pairs: int) -> list[Figure]:
    from engine.speculation.per_sequence import PerSequence
    from engine.speculation.prompt_lookup import PromptLookup

    plain = load(model, device)
    drafting = load(model, device, speculation="ngram", speculative_tokens=DRAFTS)
    source = random.Random(0)
    prompt = [source.randrange(1000, 4000) for _ in range(PROMPT)]
    request, text = Request(prompt, {REPEATED: 100.0}), Request(prompt, {})
    draft = _draft_runner(model, device, draft_model)
    cases = [
        Case(f"α = {right:g}", request, partial(PerSequence, partial(Script, right)), bound, _tau(right))
        for right, bound in CASES.items()
    ]
    cases.append(Case("random text", text, partial(PerSequence, PromptLookup), "≥ 1.0"))
    cases += [
        Case(f"draft model, α = {right:g}", request, partial(_scripted_model, draft, right), tau=_tau(right))
        for right in CASES
    ]
    cases.append(Case("draft model, none right", text, partial(_scripted_model, draft, 0.0)))
    return [_figure(plain, drafting, case, pairs) for case in cases]


def _draft_runner(model: Path, device: str, draft_model: Path) -> Any:
    from cluster.config.worker import EngineConfig
    from engine.speculation import load_draft

    return load_draft.load(
        EngineConfig(model=model, draft_model=draft_model, dtype="bfloat16", device=device)
    )


def _scripted_model(runner: Any, right: float) -> Any:
    """A draft model whose tokens are scripted."""
    from engine.speculation.draft_model import DraftModel

    script = Script(right)

    class Scripted(DraftModel):
        def most_likely(self, logits: Any) -> list[int]:
            return script.tokens(len(super().most_likely(logits)))

    return Scripted(runner)


def _tau(right: float) -> str:
    tau = DRAFTS + 1 if right == 1.0 else (1 - right ** (DRAFTS + 1)) / (1 - right)
    return f" (always {DRAFTS}: {tau:.2f})"


def _figure(plain: Any, drafting: Any, case: Case, pairs: int) -> Figure:
    drafting._drafter.method = case.method()
    ratios, seconds = list[float](), list[float]()
    steps = drafting.steps
    for number in range(pairs + 1):
        order = (drafting, plain) if number % 2 else (plain, drafting)
        taken = {id(engine): _serve(engine, case.request) for engine in order}
        if number:  # the first is not counted
            ratios.append(taken[id(plain)] / taken[id(drafting)])
            seconds.append(taken[id(drafting)])
    tokens_per_step = (pairs + 1) * TOKENS / (drafting.steps - steps)
    low, high = interval(ratios)
    rate = TOKENS / statistics.median(seconds)
    note = f"{rate:.1f} tok/s, τ = {tokens_per_step:.2f}{case.tau}; {low:.2f} to {high:.2f}, {pairs} pairs"
    return Figure(case.name, statistics.median(ratios), "×", case.bound, note)


def _serve(engine: Any, request: Request) -> float:
    """Seconds from the first token to the last."""
    from engine.request import EngineRequest, SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logit_bias=request.bias)
    engine.add(EngineRequest("bench", request.prompt, sampling))
    engine.step()
    began = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began
