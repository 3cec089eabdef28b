"""Placement while Redis does not answer: what it said last of the workers' load is used, and for how long."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio

from cluster.config.router import RouterConfig
from cluster.config.worker import Role
from cluster.membership.facts import group_id
from cluster.membership.reader import Members
from cluster.membership.types import WorkerInfo
from router.placement.calibration import Calibrations
from router.placement.candidates import Candidates
from router.placement.charges import Charges
from router.placement.eligibility import MAX_LISTED, Eligibility
from router.placement.keys import PlacementKeys
from router.placement.last_loads import READ_LEAST, VALID_SECONDS, LastLoads
from router.placement.place_script import PlaceScript, Unplaced
from router.placement.placement import Placement
from router.placement.redis_poll import RedisPoll
from router.placement.standalone_placement import StandalonePlacement
from router.placement.types import PlacementRequest

PLACED = 400


def worker(role: Role, index: int) -> WorkerInfo:
    return WorkerInfo(
        f"{role}-{index}", index, index, role, "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000
    )


def fleet(each: int) -> list[WorkerInfo]:
    return [worker(role, index) for role in ("prefill", "decode") for index in range(each)]


def request(number: int, **more: Any) -> PlacementRequest:
    return PlacementRequest(b"%016d" % number, b"", 100, 10, **more)


class Away:
    """What a router decides by itself after one reading of Redis."""

    def __init__(self, redis_url: str, namespace: str, workers: list[WorkerInfo]):
        self.client = redis.asyncio.Redis.from_url(redis_url)
        self.keys = PlacementKeys(namespace, "router")
        self.charges, self.calibrations, self.now = Charges(), Calibrations(), 1000.0
        eligibility = Eligibility(workers, "never")
        self.last = LastLoads(self.keys, self.charges, lambda: eligibility, lambda: self.now)
        self.poll = RedisPoll(self.client, [self.last])
        self.placement = StandalonePlacement(self.calibrations, self.charges, self.last, random.Random(1))
        self.candidates = Candidates(eligibility.prefill, eligibility.decode)

    def counts(self, placed: int = PLACED, **more: Any) -> Counter[str]:
        """Workers chosen, by id; nothing is charged."""
        found: Counter[str] = Counter()
        for number in range(placed):
            one = self.placement.place(request(number, **more), self.candidates)
            assert one.prefill is not None
            found.update([one.prefill.worker_id, one.decode.worker_id])
        return found


@pytest.fixture
async def away(redis_url, namespace):
    made: list[Away] = []

    def make(each: int) -> Away:
        made.append(Away(redis_url, namespace, fleet(each)))
        return made[-1]

    yield make
    for one in made:
        await one.client.aclose()


async def test_workers_that_others_have_loaded_are_avoided(away) -> None:
    one = away(4)
    for role in ("prefill", "decode"):
        for index in range(2):
            await one.client.hset(one.keys.load, f"{role[0]}:{worker(role, index).name}", 9000)
    before = one.counts()
    assert min(before[f"prefill-{i}"] for i in range(4)) > PLACED / 8, "nothing is known yet"
    await one.poll.read()
    found = one.counts()
    for role in ("prefill", "decode"):
        # Only where both of two random choices are loaded.
        assert (
            found[f"{role}-0"] + found[f"{role}-1"] < 0.35 * PLACED < found[f"{role}-2"] + found[f"{role}-3"]
        )


async def test_what_this_router_adds_afterwards_counts(away) -> None:
    one = away(2)
    candidates = one.candidates
    one.charges.add(request(1), candidates.prefill[0], candidates.decode[0], 100, in_redis=True)
    await one.client.hset(one.keys.load, f"p:{candidates.prefill[0].name}", 500)
    await one.poll.read()
    assert one.last.of(candidates.prefill[0].name) == 500, "its own was among them"
    one.charges.add(request(2), candidates.prefill[0], candidates.decode[0], 70, in_redis=False)
    one.charges.release(request(1).transfer_id)
    assert one.last.of(candidates.prefill[0].name) == 470
    assert one.last.of(candidates.prefill[1].name) == 0


async def test_of_a_large_fleet_the_least_loaded_are_used(away) -> None:
    one = away(MAX_LISTED + 20)
    any_one = worker("decode", 0)
    group = group_id(any_one.model_id, any_one.page_size, any_one.layout)
    roles: tuple[tuple[str, Role], ...] = (("p", "prefill"), ("r", "decode"))
    for kind, role in roles:
        scores = {worker(role, index).name: 10 * index for index in range(MAX_LISTED + 20)}
        await one.client.zadd(one.keys.scores(group, kind), scores)
    await one.poll.read()
    found = one.counts()
    assert {int(name.split("-")[1]) for name in found} <= set(range(READ_LEAST))
    assert one.last.of(worker("decode", READ_LEAST).name) is None
    one.now += VALID_SECONDS
    later = one.counts()
    assert any(int(name.split("-")[1]) >= READ_LEAST for name in later), "an old reading says nothing"


async def test_a_holder_beyond_the_least_loaded_is_not_taken_for_idle(away) -> None:
    one = away(MAX_LISTED + 20)
    busy = one.candidates.decode[-1]
    group = group_id(busy.model_id, busy.page_size, busy.layout)
    scores = {each.name: 1000 for each in one.candidates.decode[:READ_LEAST]} | {busy.name: 10**6}
    await one.client.zadd(one.keys.scores(group, "r"), scores)
    idle = one.candidates.decode[0]
    await one.client.zadd(one.keys.scores(group, "r"), {idle.name: 0})
    await one.poll.read()
    assert one.last.of(busy.name) is None and one.last.at_least(busy.name) == 1000
    one.placement.remember(b"k" * 8, busy.worker_id)
    found = Counter(
        one.placement.place(
            PlacementRequest(b"%016d" % number, b"k" * 8, 100, 10), one.candidates
        ).decode.worker_id
        for number in range(PLACED)
    )
    assert found[idle.worker_id] > 0 and found[busy.worker_id] < PLACED, (
        "a free worker is taken where it is drawn"
    )


async def test_a_reading_that_fails_keeps_the_last_one(away, redis_url) -> None:
    one = away(2)
    await one.client.hset(one.keys.load, f"d:{worker('decode', 0).name}", 5)
    await one.poll.read()
    await one.client.set(one.keys.load, "no hash")
    await one.poll.read()
    assert one.last.of(worker("decode", 0).name) == 5 and one.last.valid


async def test_an_old_queue_of_others_refuses_nothing(away) -> None:
    one = away(2)
    for _ in range(100):
        one.calibrations.first.observe_prefill(1000, 1000, 1.0)
    assert one.calibrations.first.known
    for index in range(2):
        await one.client.hset(one.keys.load, f"p:{worker('prefill', index).name}", 10**9)
    await one.poll.read()
    assert one.counts(5, target_seconds=0.001)


async def test_no_more_than_the_limit_ask_redis_at_a_time(redis_url, namespace, monkeypatch) -> None:
    members = Members(redis_url, namespace)
    config = RouterConfig(model="/m", redis_url=redis_url, namespace=namespace, local_prefill="never")
    placement = Placement(config, members, random.Random(1))
    await placement.start()
    asked = most = 0
    answer = asyncio.Event()

    async def script(*_: Any) -> Unplaced:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        try:
            await answer.wait()
        finally:
            asked -= 1
        return Unplaced.VOID

    monkeypatch.setattr(PlaceScript, "__call__", lambda self, *rest: script(*rest))
    monkeypatch.setattr(type(placement), "eligibility", Eligibility(fleet(2), "never"))
    try:
        waiting = [asyncio.create_task(placement.place(request(number))) for number in range(100)]
        await asyncio.sleep(0.1)
        assert asked == 32
        for one in waiting[::2]:
            one.cancel()
        answer.set()
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert most == 32 and asked == 0
        assert sum(isinstance(one, asyncio.CancelledError) for one in done) == 50
    finally:
        await placement.close()
        await members.close()


async def test_groups_that_are_large_only_together_are_read_by_name(redis_url, namespace) -> None:
    """Placements of a group with at most MAX_LISTED workers of a role do not move its sorted sets."""
    workers = [
        replace(one, model_id=model, worker_id=f"{model}-{one.worker_id}")
        for model in "mn"
        for one in fleet(MAX_LISTED - 10)
    ]
    one = Away(redis_url, namespace, workers)
    try:
        for number, each in enumerate(workers, 1):
            await one.client.hset(one.keys.load, f"{each.role[0]}:{each.name}", number)
            kind = "p" if each.role == "prefill" else "r"
            group = group_id(each.model_id, each.page_size, each.layout)
            await one.client.zadd(one.keys.scores(group, kind), {each.name: 0})
        await one.poll.read()
        assert [one.last.of(each.name) for each in workers] == list(range(1, len(workers) + 1))
    finally:
        await one.client.aclose()


async def test_a_small_group_beside_a_large_one_is_read_too(redis_url, namespace) -> None:
    small = [replace(one, model_id="n", worker_id=f"n-{one.worker_id}") for one in fleet(2)]
    one = Away(redis_url, namespace, [*small, *fleet(MAX_LISTED + 1)])
    busy = worker("decode", 0)
    try:
        await one.client.hset(one.keys.load, f"p:{small[0].name}", 7)
        group = group_id(busy.model_id, busy.page_size, busy.layout)
        await one.client.zadd(one.keys.scores(group, "r"), {busy.name: 9})
        await one.poll.read()
        assert (one.last.of(small[0].name), one.last.of(busy.name)) == (7, 9)
    finally:
        await one.client.aclose()
