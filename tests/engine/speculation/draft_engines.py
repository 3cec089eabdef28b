"""Engines that speculate with a draft model.

The fake model is its own draft: its answer depends on every token that it reads back from its cache, so each greedy draft
is accepted only if the draft model's cache has exactly the sequence's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from cluster.config.worker import EngineConfig
from engine.engine import Engine
from engine.plan import StepPlan
from engine.request import TokenOutput
from tests.engine.fake_model import FakeRunner
from tests.engine.ranks import KV_BYTES

DRAFT = Path("/draft")


class Observed(FakeRunner):
    """A draft model that keeps the plans of its steps."""

    def __init__(self, blocks: int = 100):
        super().__init__(blocks)
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan, drawn: Tensor | None = None) -> Tensor:
        self.plans.append(plan)
        return super().execute(plan, drawn)


def drafting(draft: FakeRunner, blocks: int = 100, **settings: Any) -> Engine:
    runner = FakeRunner(blocks, draft_model=DRAFT, **settings)
    engine = Engine(runner, runner.config, secret=b"s", draft=draft)
    engine._drafter.gate = None  # its drafts take as long as its tokens
    return engine


def steps(engine: Engine) -> Iterator[list[TokenOutput]]:
    """The tokens of each step, until nothing is left."""
    while engine.has_work:
        output = engine.step()
        engine.check_integrity()
        assert all(done.error is None for done in output.done)
        yield output.tokens


def answers(engine: Engine) -> dict[str, list[int]]:
    got = dict[str, list[int]]()
    for tokens in steps(engine):
        for one in tokens:
            got.setdefault(one.request_id, []).append(one.token_id)
    assert engine.stats().blocks_held == 0
    return got


def settings_for(model: Path, draft: Path | None, dtype: str) -> EngineConfig:
    return EngineConfig(
        model=model, dtype=dtype, device="cpu", kv_memory_bytes=KV_BYTES, max_model_len=256, draft_model=draft
    )
