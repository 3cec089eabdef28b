"""Blocks of drafts: spare ones, until the end of the step."""

from __future__ import annotations

import pytest

from cluster.errors import BlocksExhaustedError
from engine.request import EngineRequest
from tests.engine.fake_model import PAGE, greedy
from tests.engine.parts import Parts, request
from tests.engine.speculation.proposers import Right, Wrong, ends_of, engine_with


def test_drafts_leave_free_blocks_to_others():
    """Each running sequence may need a block of its own next."""
    drafted = {}
    for blocks in (4, 5):
        engine = engine_with(Right, blocks=blocks, speculative_tokens=8)
        engine.add(EngineRequest("one", [5] * (2 * PAGE), greedy(30)))
        for _ in range(3):  # then its last block is full, and it is to have four drafts
            engine.step()
        drafted[blocks] = engine.stats().draft_tokens
    assert drafted == {4: 2, 5: 2 + 4}


def test_drafts_evict_no_prefix():
    """The blocks that are left hold one: a request's own tokens evict it, drafts do not."""
    engine = engine_with(Right, blocks=6, speculative_tokens=8)
    ends_of(engine, EngineRequest("before", [6] * (3 * PAGE), greedy(2)))
    before = engine._pool.chains()
    engine.add(EngineRequest("r", [5] * (2 * PAGE), greedy(30)))
    for _ in range(3):  # then its third block is full, and it is to have four drafts
        engine.step()
        engine.check_integrity()
    assert engine.stats().draft_tokens == 2
    assert [len(one) for one in before] == [3] and before[0] in engine._pool.chains()


def test_drafts_leave_blocks_to_a_refused_hand_off():
    parts = Parts(8)
    running = parts.hand_off("r", tokens=PAGE)
    with pytest.raises(BlocksExhaustedError):
        parts.scheduler.reserve(request("refused", [3] * PAGE * 8), [], max_tokens=8 * PAGE)
    # The claim is to half of the cache.
    assert parts.scheduler.spare.grow(running, 6 * PAGE) == (1 + 7 - 1 - 4) * PAGE
    parts.scheduler.spare.release()
    assert len(running.blocks) == 2  # for PAGE + 1 tokens
    parts.check()


def test_blocks_of_drafts_are_freed_at_the_end_of_their_step():
    """So that none is missing to a hand-off that is offered between steps, or to the growth of others."""
    engine = engine_with(Wrong)
    engine.add(EngineRequest("r", [5] * (2 * PAGE - 2), greedy(30)))
    for _ in range(2):  # the second of two drafts is behind the second block
        engine.step()
        engine.check_integrity()
    assert engine.stats().draft_tokens == 2 and engine.stats().blocks_held == 2


def test_blocks_of_drafts_are_freed_after_a_step_that_failed(monkeypatch):
    engine = engine_with(Wrong)
    engine.add(EngineRequest("r", [5] * (2 * PAGE - 2), greedy(30)))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "execute", lambda plan, drawn=None: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.stats().blocks_held == 3
    engine._drafter._most = 0
    engine.step()
    engine.check_integrity()
    assert engine.stats().blocks_held == 2
