"""Shares of tenants, and the account of tokens inside, over random orders of arrivals, turns, cancels and expiries."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import DeadlineError
from cluster.fair_queue import FairQueue, Waiting
from tests.harness.virtual_time import VirtualLoop
from worker.admission import Admission

SEEDS = st.integers(0, 2**32)


class Tenants:
    """Two tenants that always wait, in one queue; some of their requests leave without a turn."""

    def __init__(self, seed: int, largest: dict[str, int], weights: dict[str, float]):
        self.rng, self.largest, self.weights = random.Random(seed), largest, weights
        self.queue = FairQueue()
        self.turn_of_none: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting: dict[str, list[Waiting]] = {name: [] for name in largest}
        self.got = dict.fromkeys(largest, 0.0)
        self.order = 0

    def add(self, name: str) -> None:
        tokens = self.rng.randint(1, self.largest[name])
        one = Waiting(tokens, name, self.weights[name], 0.0, self.order, self.turn_of_none)
        self.order += 1
        self.queue.push(one)
        self.waiting[name].append(one)

    def leave(self, name: str) -> None:
        """Oldest first, as deadlines pass, or any; one waits also after the next turn."""
        if len(self.waiting[name]) > 2:
            index = self.rng.choice((0, self.rng.randrange(len(self.waiting[name]))))
            assert self.queue.remove(self.waiting[name].pop(index))

    def turn(self) -> None:
        one = self.queue.pop()
        self.waiting[one.tenant].remove(one)
        self.got[one.tenant] += one.tokens / one.weight
        self.add(one.tenant)


@settings(max_examples=60, deadline=None)
@given(
    SEEDS, st.integers(1, 400), st.integers(1, 400), st.sampled_from([1.0, 3.0, 0.25]), st.floats(0.1, 0.9)
)
def test_shares_differ_by_no_more_than_a_request_of_each_whatever_leaves(
    seed: int, largest_a: int, largest_b: int, weight: float, share_of_turns: float
) -> None:
    """From any moment on. A request that has left has had no turn, and has cost none."""

    async def run() -> None:
        tenants = Tenants(seed, {"a": largest_a, "b": largest_b}, {"a": weight, "b": 1.0})
        for name in "aaabbb":
            tenants.add(name)
        low = high = 0.0
        for _ in range(150):
            if tenants.rng.random() < share_of_turns:
                tenants.turn()
            else:
                name = tenants.rng.choice("ab")
                (tenants.add if tenants.rng.random() < 0.5 else tenants.leave)(name)
            ahead = tenants.got["a"] - tenants.got["b"]
            low, high = min(low, ahead), max(high, ahead)
            assert high - low <= largest_a / weight + largest_b + 1e-6
            tenants.queue.check_integrity()

    asyncio.run(run())


class RandomAdmission:
    """Random calls to an admission on virtual time, several in a turn of the loop."""

    def __init__(self, seed: int):
        self.rng, self.loop = random.Random(seed), VirtualLoop()
        self.full = False
        self.admission = Admission(
            self.rng.choice((10, 50, 100)),
            self.rng.choice((0.5, 5.0, 30.0)),
            clock=self.loop.time,
            engine_full=lambda: self.full,
        )
        self.sizes = self.rng.choice(((1, 2, 1000), (10,), (3, 7, 40), tuple(range(1, 60))))
        self.weights = {
            name: self.rng.choice((1.0, 1 / 3, 7.0, 1e9, 1e-3, 0.0, float("nan"))) for name in "abcd"
        }
        self.tasks: list[asyncio.Task[None]] = []
        self.inside: list[tuple[int, str]] = []

    async def enter(self, tokens: int, priority: int, timeout: float, tenant: str) -> None:
        await self.admission.enter(tokens, priority, timeout, tenant, self.weights[tenant])
        self.inside.append((tokens, tenant))

    def call(self) -> None:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.4:
            timeout = rng.choice((0, -1, 0.001, 1, 1, 5, 60))
            entering = self.enter(rng.choice(self.sizes), rng.randint(-1, 1), timeout, rng.choice("abcd"))
            self.tasks.append(self.loop.create_task(entering))
        elif kind < 0.6 and self.inside:
            self.admission.leave(*self.inside.pop(rng.randrange(len(self.inside))))
        elif kind < 0.8 and self.tasks:
            rng.choice(self.tasks).cancel()
        elif kind < 0.9:
            self.full = self.full != (kind < 0.85)
            self.admission.look()
        else:
            self.loop.stand_still(rng.choice((0.001, 1, 1, 4)))

    async def check(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)
        self.admission.check_integrity()
        assert self.admission.inside_tokens == sum(tokens for tokens, _ in self.inside)
        assert self.admission.waiting == sum(not task.done() for task in self.tasks)

    async def run(self) -> None:
        for _ in range(self.rng.randint(20, 80)):
            for _ in range(self.rng.randint(1, 4)):
                self.call()
            if self.rng.random() < 0.6:
                await asyncio.sleep(self.rng.choice((0, 0, 0, 0.001, 1.0)))
            if self.rng.random() < 0.5:
                await self.check()
        for task in self.tasks:
            task.cancel()
        results = await asyncio.gather(*self.tasks, return_exceptions=True)
        wrong = [one for one in results if isinstance(one, Exception) and not isinstance(one, DeadlineError)]
        assert not wrong
        while self.inside:
            self.admission.leave(*self.inside.pop())
        assert (self.admission.inside_tokens, self.admission.waiting, self.admission.tokens) == (0, 0, 0)
        assert self.admission._inside == Counter()
        self.admission.check_integrity()


@settings(max_examples=80, deadline=None)
@given(SEEDS)
def test_the_account_of_tokens_inside_returns_to_zero(seed: int) -> None:
    admission = RandomAdmission(seed)
    try:
        admission.loop.run(admission.run())
    finally:
        admission.loop.close()
