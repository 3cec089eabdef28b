"""Engines whose drafts a proposer of the test gives, sequence by sequence."""

from __future__ import annotations

from typing import Any

from engine.engine import Engine
from engine.request import EngineRequest, TokenOutput
from engine.speculation.per_sequence import PerSequence
from tests.engine.fake_model import FakeRunner, continuation


class Right:
    """Proposes the fake model's own tokens."""

    def propose(self, tokens: list[int], count: int) -> list[int]:
        return continuation(tokens, count)


class Wrong:
    def propose(self, tokens: list[int], count: int) -> list[int]:
        return [1] * count


def engine_with(proposer: Any, blocks: int = 60, **settings: Any) -> Engine:
    runner = FakeRunner(blocks, speculation="ngram", **settings)
    engine = Engine(runner, runner.config, secret=b"s")
    engine._drafter.method = PerSequence(proposer)
    return engine


def ends_of(engine: Engine, request: EngineRequest) -> list[TokenOutput]:
    engine.add(request)
    tokens = []
    while engine.has_work:
        tokens += engine.step().tokens
        engine.check_integrity()
    assert engine.stats().blocks_held == 0
    return tokens
