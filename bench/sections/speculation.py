"""Decode of one request with speculation beside decode without, on one thread, in alternating pairs.

A bias makes the model repeat one token, and each draft of a scripted proposer is right with probability α. So the speed-up
depends on α and the number of drafts alone. (Without the bias a random model's streams diverge at near-ties of bf16,
because products of one row and of several round differently.) τ is the number of tokens per step; beside it stands
(1 − α^(γ+1)) / (1 − α), which γ drafts in every step would give.

In random text prompt lookup finds little, and it should cost nothing there.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from bench.context import Context
from bench.figures import Figure, Section
from bench.pairs.ratios import interval
from bench.sections.engine import load

PAIRS = 7
PROMPT, TOKENS = 64, 96
DRAFTS = 4
REPEATED = 7  # the token that the bias makes the model repeat
CASES = {0.6: "", 0.8: "≥ 1.8", 0.9: "≥ 1.8", 1.0: "≥ 1.8"}  # α → target


class Request(NamedTuple):
    prompt: list[int]
    bias: dict[int, float]


class Case(NamedTuple):
    name: str
    request: Request
    proposer: Callable[[], Any]
    bound: str = ""
    tau: str = ""


class Scripted:
    """Drafts that are right with probability `right`."""

    def __init__(self, right: float):
        self._right = right
        self._source = random.Random(1)

    def propose(self, tokens: list[int], count: int) -> list[int]:
        return [REPEATED if self._source.random() < self._right else REPEATED + 1 for _ in range(count)]


def run(context: Context) -> Section:
    from engine.speculation.prompt_lookup import PromptLookup

    plain = load(context.model, "cpu")
    drafting = load(context.model, "cpu", speculation="ngram", speculative_tokens=DRAFTS)
    source = random.Random(0)
    prompt = [source.randrange(1000, 4000) for _ in range(PROMPT)]
    pairs = context.repeats(PAIRS)
    figures = []
    for right, bound in CASES.items():
        request = Request(prompt, {REPEATED: 100.0})
        case = Case(f"α = {right:g}", request, partial(Scripted, right), bound, _tau(right))
        figures.append(_figure(plain, drafting, case, pairs))
    case = Case("random text", Request(prompt, {}), PromptLookup, "≥ 1.0")
    figures.append(_figure(plain, drafting, case, pairs))
    return Section("speculation", f"Speculation, up to {DRAFTS} drafts, batch 1", figures)


def _tau(right: float) -> str:
    tau = DRAFTS + 1 if right == 1.0 else (1 - right ** (DRAFTS + 1)) / (1 - right)
    return f" (always {DRAFTS}: {tau:.2f})"


def _figure(plain: Any, drafting: Any, case: Case, pairs: int) -> Figure:
    from engine.speculation.per_sequence import PerSequence

    drafting._drafter.method = PerSequence(case.proposer)
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
