"""A scheduler and an output processor without an engine or a model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from cluster.config.worker import EngineConfig
from engine.cache.block_pool import BlockPool
from engine.flight import Flight
from engine.grammar_masks import GrammarMasks
from engine.next_tokens import StopLimits
from engine.output import OutputProcessor, StepSpan
from engine.request import ChainReport, EngineRequest, EngineStats, SamplingParams, StepOutput
from engine.sampling.grammar.registry import backend_for
from engine.sampling.grammar.store import Grammars
from engine.sampling.host_sampler import HostSampler
from engine.scheduler.decision import StepDecision
from engine.scheduler.prefix_cache import PrefixCache
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Sequence
from engine.speculation.drafts import Drafter

PAGE, VOCAB, CONTEXT, EOS = 4, 16, 256, 2
STEP_SECONDS = 1 / 32


def request(name: str, prompt: list[int], new: int = 40, **more: object) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=new)
    return EngineRequest(name, prompt, sampling, **more)  # type: ignore[arg-type]


class Parts:
    def __init__(self, blocks: int, **settings: object):
        config = EngineConfig(model=Path("/none"), page_size=PAGE, max_model_len=CONTEXT, **settings)  # type: ignore[arg-type]
        self.reports: list[ChainReport] = []
        self.pool = BlockPool(blocks)
        self.prefixes = PrefixCache(
            self.pool, PAGE, self.reports.append, secret=b"s", enabled=config.prefix_caching
        )
        self.counters = EngineStats()
        self.now, self.step_seconds = 100.0, STEP_SECONDS
        self.scheduler = Scheduler(config, self.pool, self.prefixes, lambda: self.now)
        limits = StopLimits((EOS,), CONTEXT)
        drafter = Drafter(config, self.scheduler.spare, self.pool, CONTEXT, None)
        masks = GrammarMasks(Grammars(backend_for(config.model, VOCAB, (EOS,))), VOCAB)
        self.outputs = OutputProcessor(
            self.scheduler, self.prefixes, limits, self.counters, HostSampler(), drafter, masks
        )

    def choices(self, name: str) -> list[Sequence]:
        return self.scheduler.requests[name]

    def process(self, decision: StepDecision, rows: list[int | float]) -> StepOutput:
        """As if the model had computed the step: the greedy token of each row of logits; a float fills the whole row."""
        plan = decision.plan()
        logits = torch.zeros(len(rows), VOCAB)
        for row, value in zip(logits, rows, strict=True):
            if isinstance(value, float):
                row[:] = value
            else:
                row[value] = 1.0
        assert len(rows) == sum(item.num_logits for item in plan.items)
        span = StepSpan(10.0, 12.0, sum(decision.scheduled.values()))
        pending = self.outputs.begin(decision, plan, logits)
        flight = Flight(decision, plan, pending, StepOutput([], []), logits)
        self.outputs.finish(flight, span)
        self.check()
        return flight.output

    def check(self) -> None:
        self.pool.check_integrity(Counter(b for s in self.scheduler.sequences() for b in s.blocks))

    def scheduled(self, decision: StepDecision) -> dict[str, int]:
        self.check()
        return {f"{s.request.request_id}/{s.choice}": count for s, count in decision.scheduled.items()}

    def hand_off(self, name: str, tokens: int = 1, blocks: int = 1, **more: Any) -> Sequence:
        """Reserve for a prompt of so many tokens and run it from its first token. Raises BlocksExhaustedError."""
        asked = request(name, [3] * tokens, 200, **more)
        sequence = self.scheduler.reserve(asked, [], max_tokens=blocks * PAGE)
        self.scheduler.start_reserved(sequence)
        sequence.tokens.append(13)
        return sequence

    def step(self, check: bool = True) -> Counter[str]:
        """As if the model had computed a step; returns the tokens that requests got."""
        got: Counter[str] = Counter()
        self.now += self.step_seconds
        for sequence, count in self.scheduler.schedule().scheduled.items():
            sequence.num_computed += count
            if not sequence.missing:
                sequence.tokens.append(13)
                got[sequence.request.request_id] += 1
        if check:
            self.check()
        return got
