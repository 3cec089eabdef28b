"""The schedule of one step: its sequences, their order, and a cost per sequence that does not grow with their number."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.cache.block_pool import BlockPool
from engine.engine import Engine
from engine.request import EngineRequest, SamplingParams
from engine.scheduler.decision import StepDecision
from engine.scheduler.prefix_cache import PrefixCache
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S
from tests.engine.fake_model import PAGE, FakeRunner
from tests.engine.parts import Parts
from tests.engine.parts import request as make
from tests.harness.calls import count_calls


def request(name: str, tokens: int, priority: int = 0, new: int = 40) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    return EngineRequest(name, [len(name) + 3] * tokens, sampling, priority=priority)


def running(count: int, tokens: int) -> Scheduler:
    """`count` running sequences with `tokens` computed tokens and one still to be computed."""
    runner = FakeRunner(count * (tokens // PAGE + 2), max_batch_tokens=2048)
    pool = BlockPool(runner.num_blocks)
    prefixes = PrefixCache(pool, PAGE, lambda report: None, secret=b"s", enabled=True)
    scheduler = Scheduler(runner.config, pool, prefixes, lambda: 0.0)
    for number in range(count):
        sequence = Sequence(request(f"{number}", tokens, number % 3 - 1), 0, [5] * (tokens + 1), number)
        sequence.blocks = pool.allocate(tokens // PAGE)
        sequence.num_computed = tokens
        sequence.machine.to(S.RUNNING)
        scheduler.running[sequence] = None
    return scheduler


def calls_of(scheduler: Scheduler) -> tuple[int, StepDecision]:
    decisions: list[StepDecision] = []
    calls = count_calls(lambda: decisions.append(scheduler.schedule()))
    return calls, decisions[0]


def calls_of_a_step(count: int, tokens: int) -> int:
    calls, decision = calls_of(running(count, tokens))
    assert len(decision.scheduled) == count
    return calls


@pytest.mark.parametrize("tokens", [6, 8], ids=["within a block", "each takes a block"])
def test_the_cost_of_a_step_per_sequence_is_constant(tokens: int) -> None:
    few, many = calls_of_a_step(32, tokens), calls_of_a_step(256, tokens)
    assert many <= 8 * few
    assert many <= 30 * 256


def test_single_tokens_come_before_chunks_and_higher_classes_before_lower_ones() -> None:
    runner = FakeRunner(64, max_batch_tokens=8)
    engine = Engine(runner, runner.config, secret=b"s")
    for name, priority in (("batch", -1), ("normal", 0), ("high", 1)):
        engine.add(request(name, 4, priority))
        engine.step()
    engine.add(request("long and high", 40, 1))
    engine.step()  # from now on it runs, in chunks of what the others leave
    scheduled = engine._scheduler.schedule().scheduled
    assert [(s.request.request_id, count) for s, count in scheduled.items()] == [
        ("high", 1),
        ("normal", 1),
        ("batch", 1),
        ("long and high", 5),
    ]


def test_the_oldest_of_a_class_comes_first() -> None:
    scheduler = running(12, 6)
    backwards = list(reversed(scheduler.running))
    scheduler.running.clear()
    scheduler.running.update(dict.fromkeys(backwards))
    scheduled = scheduler.schedule().scheduled
    orders = [(s.rank, s.arrival) for s in scheduled]
    assert orders == sorted(orders) and len(orders) == 12


def test_a_sequence_scheduled_in_a_step_is_preempted_in_it_if_its_tenant_holds_more() -> None:
    """It came first and has its block already; nothing is computed yet, so the step goes on without it."""
    runner = FakeRunner(11, max_batch_tokens=64)
    engine = Engine(runner, runner.config, secret=b"s")
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.add(EngineRequest("large", [3] * 6 * PAGE, sampling, tenant="a"))
    engine.add(EngineRequest("small", [4] * 2 * PAGE, sampling, tenant="b"))
    engine.step()
    for _ in range(PAGE):
        assert len(engine.step().tokens) == 2
    assert engine.stats().blocks_free == 1
    decision = engine._scheduler.schedule()
    assert [s.request.request_id for s in decision.scheduled] == ["small"]
    assert decision.preemptions == 1
    engine.check_integrity()


def test_the_secret_is_in_no_text_of_the_prefix_cache() -> None:
    pool = BlockPool(4)
    assert "top" not in repr(PrefixCache(pool, PAGE, lambda report: None, secret=b"top", enabled=True))


def calls_while_an_eviction_is_pending(count: int) -> int:
    """All of `count` sequences need a block, and a reservation with the last ones is being evicted."""
    parts = Parts(3 * count, max_batch_tokens=2 * count)
    for number in range(count):
        sequence = parts.hand_off(f"{number}", tokens=3)
        sequence.tokens.append(13)
        sequence.num_computed = PAGE
    parts.scheduler.reserve(make("last", [3] * PAGE), [], parts.pool.num_free * PAGE)
    assert parts.scheduler.schedule().evicted_reservations == ["last"]
    calls, decision = calls_of(parts.scheduler)
    assert not decision.scheduled
    return calls


def calls_of_a_step_that_preempts(count: int) -> int:
    """All of `count` sequences of several tenants need a block, and none is free."""
    parts = Parts(2 * count + count // 10, max_batch_tokens=2 * count)
    for number in range(count):
        sequence = parts.hand_off(f"{number}", tokens=3, blocks=2, tenant=f"t{number % 5}")
        sequence.tokens += [13] * (PAGE + 1)
        sequence.num_computed = 2 * PAGE
    for number in range(count // 10):  # of a tenant that holds less: they are not evicted
        parts.scheduler.reserve(make(f"reserved {number}", [3] * 3, tenant="r"), [], PAGE)
    calls, decision = calls_of(parts.scheduler)
    assert decision.preemptions + len(decision.scheduled) == count
    return calls


@pytest.mark.parametrize("calls", [calls_while_an_eviction_is_pending, calls_of_a_step_that_preempts])
def test_a_step_that_is_short_of_blocks_costs_no_more_per_sequence_with_many(
    calls: Callable[[int], int],
) -> None:
    assert calls(1600) <= 10 * calls(200)


def test_a_sequence_beyond_the_budget_costs_a_step_little() -> None:
    def calls(count: int) -> int:
        parts = Parts(2 * count, max_batch_tokens=32)
        for number in range(count):
            parts.hand_off(f"{number}", tenant=f"t{number % 4}")
        return calls_of(parts.scheduler)[0]

    assert calls(1064) - calls(64) <= 4 * 1000


class CountedLooks(dict[Sequence, int]):
    looks = 0

    def __contains__(self, one: object) -> bool:
        self.looks += 1
        return super().__contains__(one)


def test_rows_are_looked_through_once_in_a_step() -> None:
    """The first holders are in every step: those of tenants with few sequences, beside one with many."""
    parts = Parts(400, max_batch_tokens=64)
    for number in range(32):
        parts.hand_off(f"light {number}", tenant=f"t{number}")
    parts.scheduler.rows.assign(parts.scheduler.schedule().scheduled)
    for number in range(96):
        parts.hand_off(f"heavy {number}", tenant="heavy")
    for _ in range(4):
        parts.step()
        scheduled = CountedLooks(parts.scheduler.schedule().scheduled)
        parts.scheduler.rows.assign(scheduled)
        assert scheduled.looks <= 64
        parts.scheduler.rows.check_integrity(parts.scheduler.sequences())
