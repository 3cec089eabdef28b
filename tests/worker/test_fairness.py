"""Order of waiting requests: classes before tenants, tenants by weight, and no request waits for ever."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import DeadlineError
from cluster.fair_queue import FairQueue, Waiting
from tests.worker.fair_queues import queued, waiting
from worker.admission import Admission


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Crowd:
    """Requests that enter one at a time: the worker holds one, the others wait."""

    def __init__(self, aging_seconds: float = 30.0):
        self.clock = Clock()
        self.admission = Admission(0, aging_seconds, self.clock)
        self.served: list[tuple[str, int]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.inside = 0

    async def ask(self, name: str, tokens: int, weight: float = 1.0, priority: int = 0) -> asyncio.Task[None]:
        async def enter() -> None:
            await self.admission.enter(tokens, priority, 60.0, name, weight)
            self.served.append((name, tokens))
            self.inside = tokens

        task = asyncio.create_task(enter())
        self.tasks.append(task)
        await asyncio.sleep(0)
        return task

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        self.admission.check_integrity()

    async def next(self) -> tuple[str, int]:
        """The order of entries as those inside leave one by one."""
        before = len(self.served)
        self.admission.leave(self.inside, self.served[-1][0])
        await self.settle()
        assert len(self.served) == before + 1
        return self.served[-1]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 400), st.sampled_from([1.0, 3.0, 0.25, 7.0])
)
def test_backlogged_tenants_get_tokens_by_weight(seed: int, largest_a: int, largest_b: int, weight: float):
    """At every moment, not only in the long run, and for any sizes of requests."""

    async def run() -> None:
        crowd, rng = Crowd(), random.Random(seed)
        limits, weights = {"a": largest_a, "b": largest_b}, {"a": weight, "b": 1.0}
        await crowd.ask("first", 1)
        for _ in range(3):
            for name in "ab":
                await crowd.ask(name, rng.randint(1, limits[name]), weights[name])
        got: Counter[str] = Counter()
        bound = sum(limits[name] / weights[name] for name in "ab")
        for _ in range(150):
            name, tokens = await crowd.next()
            got[name] += tokens
            await crowd.ask(name, rng.randint(1, limits[name]), weights[name])
            assert abs(got["a"] / weights["a"] - got["b"] / weights["b"]) <= 2 * bound
        await crowd.close()

    asyncio.run(run())


async def test_three_to_one():
    crowd = Crowd()
    await crowd.ask("first", 1)
    for _ in range(400):
        await crowd.ask("big", 10, 3.0)
        await crowd.ask("small", 10, 1.0)
    got = Counter([(await crowd.next())[0] for _ in range(200)])
    assert abs(got["big"] - 150) <= 2 and abs(got["small"] - 50) <= 2
    await crowd.close()


async def test_a_lone_tenant_gets_everything_and_owes_nothing_for_it():
    crowd = Crowd()
    await crowd.ask("lone", 100)
    for _ in range(50):
        await crowd.ask("lone", 100)
    for _ in range(20):
        assert (await crowd.next())[0] == "lone"
    for _ in range(20):
        await crowd.ask("late", 100)
    got = Counter([(await crowd.next())[0] for _ in range(20)])
    assert abs(got["late"] - 10) <= 1, "the newcomer takes its share, neither more nor less"
    await crowd.close()


async def test_classes_come_first():
    crowd = Crowd()
    await crowd.ask("first", 1)
    await crowd.ask("batch", 1, 100.0, -1)
    await crowd.ask("normal", 1000, 1.0, 0)
    await crowd.ask("high", 1000, 1.0, 1)
    assert [(await crowd.next())[0] for _ in range(3)] == ["high", "normal", "batch"]
    await crowd.close()


async def test_batch_is_not_starved_for_ever():
    crowd = Crowd(aging_seconds=5.0)
    await crowd.ask("first", 10)
    await crowd.ask("batch", 10, 1.0, -1)
    served = []
    for _ in range(20):
        await crowd.ask("busy", 10)
        await crowd.ask("busy", 10)
        crowd.clock.now += 1.0
        served.append((await crowd.next())[0])
    assert "batch" not in served[:4]
    assert "batch" in served[4:8], (
        "from then on it is one of the normal ones, and takes its turn among tenants"
    )
    await crowd.close()


async def test_a_request_that_gives_up_admits_the_next_and_holds_nothing():
    admission = Admission(10)
    await admission.enter(8, 0, 1.0)
    large = asyncio.create_task(admission.enter(8, 0, 0.05, "a"))
    await asyncio.sleep(0)
    small = asyncio.create_task(admission.enter(2, 0, 5.0, "a"))
    await asyncio.sleep(0)
    assert not small.done()
    with pytest.raises(DeadlineError):
        await large
    await asyncio.wait_for(small, 1.0)
    admission.check_integrity()
    assert (admission.inside_tokens, admission.waiting) == (10, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "leave", "cancel", "wait"]), st.integers(0, 5), st.integers(1, 60)
        ),
        max_size=60,
    )
)
def test_any_order_of_events_keeps_admission_consistent(events: list[tuple[str, int, int]]):
    async def run() -> None:
        clock = Clock()
        admission = Admission(100, 10.0, clock)
        waiting: list[asyncio.Task[int]] = []
        inside: list[int] = []

        async def enter(tokens: int, priority: int, tenant: str) -> int:
            await admission.enter(tokens, priority, 60.0, tenant, tokens % 3 + 0.5)
            return tokens

        for what, number, tokens in events:
            if what == "enter":
                waiting.append(asyncio.create_task(enter(tokens, number % 3 - 1, "abc"[number % 3])))
            elif what == "leave" and inside:
                admission.leave(inside.pop(number % len(inside)))
            elif what == "cancel" and waiting:
                waiting[number % len(waiting)].cancel()
            elif what == "wait":
                clock.now += number
            for _ in range(4):
                await asyncio.sleep(0)
            inside += [task.result() for task in waiting if task.done() and not task.cancelled()]
            waiting = [task for task in waiting if not task.done()]
            admission.check_integrity()
            assert admission.inside_tokens == sum(inside)
            assert admission.waiting == len(waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(run())


async def test_a_tenant_is_refunded_for_a_request_that_gave_up():
    """Its next request is as early as if the other had never arrived."""
    queue = FairQueue()
    queue.push(waiting(0, "b", 100))
    given_up = waiting(1, "a", 100, 0.25)
    queue.push(given_up)
    assert queue.remove(given_up)
    queue.push(waiting(2, "a", 20, 0.25))
    queue.check_integrity()
    assert [(queue.pop().tenant, queue.tokens) for _ in range(2)] == [("a", 100), ("b", 0)]


async def test_a_request_that_leaves_costs_nothing_with_others_of_its_tenant_behind_it():
    """Deadlines end the oldest first: those behind it are as early as if it had never arrived."""
    queue = FairQueue()
    given_up, behind = waiting(0, "a", 1000), waiting(1, "a", 10)
    queue.push(given_up)
    queue.push(behind)
    queue.push(waiting(2, "b", 1005))
    queue.remove(given_up)
    queue.push(waiting(3, "a", 10))
    queue.check_integrity()
    assert [queue.pop().order for _ in range(3)] == [1, 3, 2]


@pytest.mark.parametrize("tokens", [(100, 50, 70), (50, 100, 70)])
async def test_a_tenant_that_was_ahead_stays_so_without_the_request_that_left(tokens: tuple[int, int, int]):
    """What its earlier requests have used still counts."""
    queue = FairQueue()
    served, gone, last = tokens
    queue.push(waiting(0, "keeps the queue", 10_000))
    queue.push(waiting(1, "a", served))
    leaves = waiting(2, "a", gone)
    queue.push(leaves)
    assert queue.pop().order == 1
    queue.push(waiting(3, "b", last - 1))
    queue.push(waiting(4, "a", last))
    queue.remove(leaves)
    queue.check_integrity()
    assert [queue.pop().order for _ in range(3)] == [3, 4, 0]


async def test_a_tenant_served_out_of_order_pays_for_it_when_it_returns():
    """`pop_others` leaves the virtual time where it is, so the tenant is ahead of it."""
    queue = FairQueue()
    for order in range(3):
        queue.push(waiting(order, "a", 100))
    queue.push(waiting(3, "b", 1000))
    (found,) = queue.pop_others({"a"})
    assert found.tenant == "b"
    queue.push(waiting(4, "b", 1))
    queue.check_integrity()
    assert [queue.pop().order for _ in range(4)] == [0, 1, 2, 4]


async def test_an_unknown_request_refunds_nothing():
    queue = FairQueue()
    gone = waiting(0, "a", 50)
    queue.push(gone)
    queue.push(waiting(1, "a", 50))
    queue.push(waiting(2, "b", 1000))
    assert queue.pop() is gone
    assert not queue.remove(gone)
    assert queue.tokens == 1050
    queue.check_integrity()


def test_a_tenant_that_waits_keeps_its_tag_when_another_request_of_it_is_cancelled() -> None:
    """Its tag is then that of the request which was popped: equal sizes meet there."""
    loop, queue = asyncio.new_event_loop(), FairQueue()
    x, a, b = (queued(queue, loop, name, 1000, order) for order, name in enumerate(("x", "a", "a")))
    assert queue.pop() is x
    assert queue.remove(b)
    queue.check_integrity()
    assert queue.pop() is a
    queue.check_integrity()
    loop.close()


@pytest.mark.parametrize("seed", range(40))
def test_the_queue_is_whole_after_any_order_of_calls_with_few_sizes(seed: int) -> None:
    """Few sizes, so that tags are often equal."""
    rng, loop, queue = random.Random(seed), asyncio.new_event_loop(), FairQueue()
    waiting: list[Waiting] = []
    for order in range(150):
        action = rng.choice(("push", "push", "pop", "other", "remove"))
        if action == "push":
            waiting.append(queued(queue, loop, rng.choice("abc"), rng.choice((1, 2, 1000)), order))
        elif action == "pop" and waiting:
            waiting.remove(queue.pop())
        elif action == "other":
            for found in queue.pop_others(set(rng.sample("abc", rng.randint(1, 2)))):
                waiting.remove(found)
        elif action == "remove" and waiting:
            assert queue.remove(waiting.pop(rng.randrange(len(waiting))))
        queue.check_integrity()
        assert len(queue) == len(waiting)
    loop.close()
