"""Victims come from a heap of tenants. It chooses those of a plain scan, and a choice costs little beside many tenants."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from cluster.errors import BlocksExhaustedError
from engine.request import EngineRequest, SamplingParams
from engine.scheduler import scheduler as scheduler_module
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S
from engine.scheduler.shares import Shares, Victims
from tests.engine.parts import PAGE, Parts, request
from tests.engine.scheduler.starvation_world import World
from tests.harness.calls import count_calls


class PlainScan:
    """The rule as it is written, by a look at every sequence for each victim."""

    def __init__(self, running: Iterable[Sequence], shares: Shares):
        self._shares = shares
        self._left = {one: one.preempted_at == len(one.tokens) for one in running}

    def next(self) -> Sequence:
        ones = [one for one in self._left if one.state is S.RUNNING]
        lowest = [one for one in ones if one.rank == max(other.rank for other in ones)]
        others = [one for one in lowest if not self._left[one]]
        if not others:
            victim = max(lowest, key=lambda one: one.arrival)
        else:
            youngest = {one.request.tenant: one for one in sorted(others, key=lambda one: one.arrival)}
            victim = max(youngest.values(), key=lambda one: (self._shares.of(one.request), one.arrival))
        del self._left[victim]
        return victim


def random_sequences(rng: random.Random, count: int) -> list[Sequence]:
    ones = []
    for arrival in range(count):
        asked = EngineRequest(
            str(arrival),
            [1],
            SamplingParams(),
            priority=rng.choice((-1, 0, 0, 1)),
            tenant=rng.choice("abcdefgh"),
            weight=rng.choice((0.5, 1.0, 1.0, 3.0)),
        )
        one = Sequence(asked, 0, [1], arrival, S.RUNNING)
        one.preempted_at = rng.choice((-1, -1, 1))
        ones.append(one)
    rng.shuffle(ones)
    return ones


@pytest.mark.parametrize("seed", range(300))
def test_the_victims_are_those_of_a_plain_scan(seed: int) -> None:
    """Between two choices tenants grow and shrink, and sequences leave of which the victim's tenant has more."""
    rng = random.Random(seed)
    ones = random_sequences(rng, rng.randint(1, 60))
    blocks = Counter({tenant: rng.randint(0, 12) for tenant in "abcdefgh"})
    shares = Shares(blocks)
    victims, plain = Victims(ones, shares), PlainScan(ones, shares)
    while any(one.state is S.RUNNING for one in ones):
        victim = victims.next()
        assert victim is plain.next()
        victim.machine.to(S.WAITING)
        blocks[victim.request.tenant] = max(0, blocks[victim.request.tenant] - rng.randint(0, 6))
        if rng.random() < 0.2:  # another choice of a request that is returned
            of_tenant = [
                one for one in ones if one.state is S.RUNNING and one.request.tenant == victim.request.tenant
            ]
            for one in of_tenant[:1]:
                one.machine.to(S.FINISHED)
        for tenant in rng.sample("abcdefgh", rng.randint(0, 3)):
            if rng.random() < 0.5:
                blocks[tenant] += rng.randint(1, 6)
                shares.grew(tenant)
            else:
                blocks[tenant] = max(0, blocks[tenant] - rng.randint(1, 6))


def test_the_victims_of_a_scheduler_are_those_of_a_plain_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []

    class Both:
        def __init__(self, running: Iterable[Sequence], shares: Shares):
            self._victims, self._plain = Victims(running, shares), PlainScan(running, shares)

        def next(self) -> Sequence:
            chosen.append(self._victims.next())
            assert chosen[-1] is self._plain.next()
            return chosen[-1]

    monkeypatch.setattr(scheduler_module, "Victims", Both)
    for seed in range(6):
        World(seed, ranks=(-1, 0, 0, 1), max_batch_tokens=(5, 8, 64)[seed % 3]).run()
    assert len(chosen) > 100


def grown(parts: Parts, name: str, tenant: str, blocks: int, full: int = 0, **more: Any) -> Sequence:
    """A hand-off that runs with so many blocks, of which its tokens fill `full`; then it needs one more."""
    one = parts.hand_off(name, blocks=blocks, tenant=tenant, **more)
    if full:
        one.tokens += [13] * (full * PAGE + 1 - len(one.tokens))
        one.num_computed = full * PAGE
    return one


def test_a_tenant_that_grows_after_the_first_victim_gives_the_second() -> None:
    """Before it grew, another one held as much and came last."""
    parts = Parts(1 + 2 + 1 + 3 + 2 + 2 + 4)
    for name, full in (("g", 1), ("b", 2), ("h", 1)):
        grown(parts, name, name, full, full)
    for name, blocks in (("a0", 3), ("a1", 2), ("b1", 2), ("c", 4)):
        grown(parts, name, name[0], blocks)
    assert parts.scheduler.schedule().preemptions == 2
    victims = {one.request.request_id for one in parts.scheduler.sequences() if one.preempted_at >= 0}
    assert victims == {"a1", "b1"}


def test_a_tenant_that_is_admitted_after_the_first_victim_may_give_the_second() -> None:
    parts = Parts(20)
    ones = [grown(parts, f"{number}", tenant, 2) for number, tenant in enumerate("caabb")]
    victims = Victims(ones, parts.scheduler.blocks.shares)
    assert victims.next() is ones[4]
    parts.scheduler.blocks.allocate(Sequence(request("joins", [3], tenant="c"), 0, [3], 9), [], 3)
    parts.scheduler.remove("4")
    assert victims.next() is ones[0], "its tenant held least before"


def test_the_cost_of_many_preemptions_is_not_that_of_a_look_at_every_tenant_each() -> None:
    def calls(size: int) -> int:
        parts = Parts(2 * size + size // 2, max_batch_tokens=4 * size)
        for number in range(size // 2):
            grown(parts, f"grows {number}", f"g{number}", 1, full=1, priority=1)
        for number in range(size):
            grown(parts, f"holds {number}", f"t{number}", 2)
        decided = count_calls(parts.scheduler.schedule)
        assert len(parts.scheduler.waiting) == size // 4
        return decided

    assert calls(800) <= 3 * calls(400)


def test_reservations_are_not_looked_through_for_each_tenant_that_grows() -> None:
    """None may be evicted: their class is higher."""

    def calls(reserved: int) -> int:
        parts = Parts(40 * 2 + reserved)
        for number in range(40):
            grown(parts, f"grows {number}", f"g{number}", 2, full=2)
        for number in range(reserved):
            parts.scheduler.reserve(request(f"{number}", [3], priority=1, tenant=f"r{number}"), [], 1)
        with pytest.raises(BlocksExhaustedError):
            parts.scheduler.reserve(request("more", [3]), [], 1)
        return count_calls(parts.scheduler.schedule)

    assert calls(400) - calls(200) <= 200 * 25


def test_the_order_of_victims_ends_with_its_step() -> None:
    """Else each growth would be told to all that ever were."""
    parts = Parts(4)
    shares = parts.scheduler.blocks.shares
    shares.order([], S.RUNNING)
    parts.step()
    assert not shares._orders
