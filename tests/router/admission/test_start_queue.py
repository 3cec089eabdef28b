"""Requests start one per turn of the event loop, tenants in turns by weight."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest

from cluster.errors import CancelledError
from router.admission.start_queue import SECONDS_PER_START, StartQueue, StartWait
from tests.harness.waiting import turns


class Started:
    """Requests that note when they start."""

    def __init__(self, starts: StartQueue):
        self.starts = starts
        self.order: list[str] = []

    def ask(self, tenant: str, weight: float = 1.0, model: str = "") -> asyncio.Task[None]:
        return asyncio.create_task(self._ask(tenant, weight, model))

    async def _ask(self, tenant: str, weight: float, model: str) -> None:
        await self.starts.turn(tenant, weight, model=model)
        self.order.append(tenant)


async def idle(starts: StartQueue) -> None:
    await turns(3)
    starts.check_integrity()
    assert not len(starts) and not starts._counting, "nothing is left of the requests"


async def test_a_request_on_a_quiet_router_does_not_wait() -> None:
    starts = StartQueue()
    for _ in range(3):
        with pytest.raises(StopIteration):  # it ended without a turn of the loop
            starts.turn("a").send(None)
        await idle(starts)


async def test_a_tenant_with_many_requests_delays_anothers_by_one_each() -> None:
    """They started in the order of arrival, hundreds in a turn: another tenant's request took seconds."""
    starts = StartQueue(lambda: 0.0)
    started = Started(starts)
    tasks = [started.ask(tenant) for tenant in [*200 * ["greedy"], *3 * ["other"], "third"]]
    await turns(12)
    assert started.order[:8] == ["greedy", "greedy", "other", "third", *2 * ["greedy", "other"]]
    await turns(200)
    assert all(task.done() for task in tasks)
    await idle(starts)


async def test_models_take_turns_and_of_each_model_its_tenants() -> None:
    """Without keys, or with one tenant, a surging model's requests would all start first."""
    starts = StartQueue(lambda: 0.0)
    started = Started(starts)
    surge = [started.ask("greedy", model="surging") for _ in range(100)]
    tasks = [started.ask("late", model="surging"), *[started.ask("other", model="quiet") for _ in range(3)]]
    await turns(10)
    assert started.order[:7] == ["greedy", "greedy", "other", "late", "other", "greedy", "other"]
    await turns(100)
    assert all(task.done() for task in (*surge, *tasks))
    await idle(starts)


async def test_one_request_starts_per_turn() -> None:
    starts = StartQueue(lambda: 0.0)
    started = Started(starts)
    tasks = [started.ask("a") for _ in range(20)]
    gained = []
    for _ in range(24):
        before = len(started.order)
        await asyncio.sleep(0)
        gained.append(len(started.order) - before)
    assert max(gained) == 1 and len(started.order) == 20
    await asyncio.gather(*tasks)
    await idle(starts)


async def test_a_loop_with_long_turns_starts_more() -> None:
    """Else tokens of many streams would starve requests."""
    now = 0.0
    starts = StartQueue(lambda: now)
    started = Started(starts)
    tasks = [started.ask("a") for _ in range(100)]
    await turns(2)
    before = len(started.order)
    for _ in range(5):
        now += 4.5 * SECONDS_PER_START
        await asyncio.sleep(0)
    assert 4 * 4 <= len(started.order) - before <= 4 * 6
    for task in tasks:
        task.cancel()
    await idle(starts)


def lose_the_processor(seconds: float) -> None:
    time.sleep(seconds)


async def test_turns_that_are_long_because_others_have_the_processor_start_no_more() -> None:
    """They did: on a busy machine each turn started dozens, which made the next one longer."""
    starts = StartQueue()
    started = Started(starts)
    tasks = [started.ask("a") for _ in range(40)]
    await turns(2)
    for _ in range(4):
        before = len(started.order)
        lose_the_processor(5 * SECONDS_PER_START)
        await asyncio.sleep(0)
        assert len(started.order) - before <= 1
    await asyncio.gather(*tasks)
    await idle(starts)


async def test_tenants_start_requests_by_weight() -> None:
    starts = StartQueue(lambda: 0.0)
    started = Started(starts)
    tasks = [started.ask(*one) for _ in range(40) for one in (("light", 1.0), ("heavy", 3.0), ("none", 0.0))]
    await turns(26)
    counted = Counter(started.order[:25])
    assert 14 <= counted["heavy"] <= 16 and abs(counted["light"] - counted["none"]) <= 2
    for task in tasks:
        task.cancel()
    await idle(starts)


async def test_a_request_that_is_cancelled_takes_no_turn() -> None:
    starts = StartQueue(lambda: 0.0)
    started = Started(starts)
    first, *others = [started.ask("a") for _ in range(50)]
    last = started.ask("a")
    await asyncio.sleep(0)
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    await turns(2)
    assert first.done() and last.done() and started.order == ["a", "a"]
    await idle(starts)


async def test_a_turn_granted_to_a_request_that_is_cancelled_is_lost_for_that_turn_only() -> None:
    starts = StartQueue(lambda: 0.0)
    started = Started(starts)
    tasks = [started.ask("a") for _ in range(4)]
    await turns(2)
    assert len(starts) == 2, "the second's is granted; its task has not run"
    tasks[1].cancel()
    await turns(6)
    assert started.order == ["a", "a", "a"] and tasks[1].cancelled()
    await idle(starts)


class Watched:
    """A client that leaves."""

    def __init__(self, *, gone: bool = False):
        self.gone = gone
        self.watcher: StartWait | None = None

    def watch(self, watcher: StartWait) -> None:
        self.watcher = watcher
        if self.gone:
            watcher.disconnected()

    def unwatch(self) -> None:
        self.watcher = None


@pytest.mark.parametrize("gone", [False, True])
async def test_a_request_whose_client_leaves_is_not_started(gone: bool) -> None:
    starts, client = StartQueue(lambda: 0.0), Watched(gone=gone)
    started = Started(starts)
    tasks = [started.ask("a") for _ in range(5)]
    await asyncio.sleep(0)
    left = asyncio.create_task(starts.turn("a", 1.0, client))
    after = started.ask("a")
    await asyncio.sleep(0)
    if client.watcher is not None:
        client.watcher.resumed()
        client.watcher.disconnected()
    with pytest.raises(CancelledError):
        await left
    assert client.watcher is None
    await asyncio.gather(*tasks, after)
    await idle(starts)


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_comes_and_goes_nothing_is_left(seed: int) -> None:
    random_ = random.Random(seed)
    starts = StartQueue()
    started = Started(starts)
    tasks: list[asyncio.Task[None]] = []
    for _ in range(300):
        tasks += [started.ask(random_.choice("abc"), random_.choice((0.5, 1, 2))) for _ in range(2)]
        if random_.random() < 0.4:
            random_.choice(tasks).cancel()
        if random_.random() < 0.7:
            await asyncio.sleep(0)
        starts.check_integrity()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert len(started.order) == sum(one is None for one in results) > 300
    await idle(starts)
