"""Every condition of `place.lua` and `settle.lua` in a real Redis, called as a router calls them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest
import redis

from cluster.index import scripts
from cluster.membership import keys
from cluster.membership.types import WorkerInfo
from router.placement.candidates import Candidates
from router.placement.place_script import script_source
from router.placement.settlement import settle_source
from tests.harness.redis_text import decoded

INFO = WorkerInfo("", 1, 0, "prefill", "m", "h:1", "", b"", "", "h", 4096, 1000)
PREDICT_MS, TTL_MS, LEASE_MS = 10_000, 3_600_000, 60_000
LEAVING, VOID = -4, -5


@dataclass
class Cluster:
    """Two prefill and two decode workers of equal cost: 16,000 tokens of room at each decode worker."""

    client: redis.Redis
    namespace: str
    router: str = "router"
    run: int = 1
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    tables: Iterator[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        names = ["p1", "p2", "d1", "d2"]
        self.workers = [
            replace(INFO, worker_id=name, slot=slot, role="prefill" if name[0] == "p" else "decode")
            for slot, name in enumerate(names, 1)
        ]
        self.by_id = {one.worker_id: one for one in self.workers}
        self.tag = f"{{{self.namespace}}}:"
        for one in self.workers:
            self.client.hset(keys.slot_owners(self.namespace), str(one.slot), one.name)

    def load(self) -> dict[str, int]:
        kept = self.client.hgetall(self.tag + "load")
        return {decoded(name): int(amount) for name, amount in kept.items() if name}

    def of(self, worker_id: str) -> str:
        """Its field of the load."""
        return f"{worker_id[0]}:{self.by_id[worker_id].name}"

    def place(self, tokens: int = 100, *, output: int = 10, number: int | None = None, **more: Any) -> Any:
        candidates = Candidates(self.workers[:2], self.workers[2:], "never")
        names = ("load", "routers", "calls", f"chg:{self.router}")
        answers = f"{self.tag}answers:{self.router}"
        script_keys = [
            keys.slot_owners(self.namespace),
            *(self.tag + name for name in names),
            keys.drains(self.namespace),
            answers,
        ]
        arguments = [
            *(scripts.prefix(self.namespace, "m"), self.router, more.get("chain", b""), tokens, 16, output),
            *(
                "never",
                more.get("random", 0.0),
                1e-3,
                0.0,
                1.0,
                struct.pack(">5d", *[1e12] * 5),
                1e-9,
                "hybrid",
            ),
            *(TTL_MS, PREDICT_MS, 1000.0, more.get("priority_class", "normal"), 0, 0),
            *(self.run, next(self.numbers) if number is None else number, LEASE_MS),
            *candidates.arguments,
        ]
        answer = self.client.eval(script_source(), len(script_keys), *script_keys, *arguments)
        if int(answer[0]) < 0:
            return int(answer[0])
        return tuple(candidates.workers[int(index) - 1].worker_id for index in answer[:2])

    def settle(
        self, table: dict[str, int], *, number: int | None = None, oldest: int = 0, **more: Any
    ) -> int:
        router = more.get("router", self.router)
        names = ("load", "routers", f"chg:{router}", f"answers:{router}", "runs")
        pairs = [part for one in table.items() for part in one]
        head = [router, more.get("lease", LEASE_MS), more.get("run", self.run)]
        head += [next(self.tables) if number is None else number, oldest]
        script_keys = [self.tag + name for name in names]
        return int(self.client.eval(settle_source(), len(script_keys), *script_keys, *head, *pairs))

    def expire(self, router: str) -> None:
        """Its lease has run out."""
        self.client.zadd(self.tag + "routers", {router: 1})


@pytest.fixture
def cluster(redis_url: str, namespace: str) -> Iterator[Cluster]:
    with redis.Redis.from_url(redis_url) as client:
        yield Cluster(client, namespace)


# --- placing ----------------------------------------------------------------------------------------------------


def test_a_placement_is_charged_to_both_and_to_the_routers_table(cluster):
    p, d = cluster.place(300, output=20, priority_class="batch")
    table = {cluster.of(p): 300, f"batch:{cluster.of(p)}": 300, cluster.of(d): 320}
    assert cluster.load() == table
    kept = cluster.client.hgetall(cluster.tag + "chg:router")
    assert {decoded(name): int(amount) for name, amount in kept.items()} == table


@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_that_was_asked_to_drain_gets_no_requests(cluster, index):
    chosen = cluster.place(number=0)
    cluster.settle({})
    cluster.client.hset(keys.drains(cluster.namespace), chosen[index], "process:exit")
    before = cluster.load()
    calls = cluster.client.get(cluster.tag + "calls")
    assert cluster.place() == LEAVING
    assert cluster.load() == before, "nothing was charged"
    assert cluster.client.get(cluster.tag + "calls") == calls, "it is no placement"
    cluster.client.hset(cluster.tag + "load", cluster.of(chosen[index]), 5000)  # now another one is better
    assert chosen[index] not in cluster.place()


@pytest.mark.parametrize("index", [0, 1])
def test_a_slot_that_another_owns_now_is_not_placed_on(cluster, index):
    chosen = cluster.place()
    slot = str(cluster.by_id[chosen[index]].slot)
    cluster.settle({})
    for owner in (f"{chosen[index]}@{2:016x}", None):
        if owner is None:
            cluster.client.hdel(keys.slot_owners(cluster.namespace), slot)
        else:
            cluster.client.hset(keys.slot_owners(cluster.namespace), slot, owner)
        assert cluster.place() == LEAVING
        assert cluster.load() == {}


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.999])
def test_a_request_goes_to_a_worker_with_room(cluster, chance):
    """A busy worker costs next to nothing here; lack of room costs a second, and more the more is lacking."""
    cluster.client.hset(cluster.tag + "load", cluster.of("d1"), 15_891)
    cluster.client.hset(cluster.tag + "load", cluster.of("d2"), 15_890)
    assert cluster.place(100, output=10, random=chance)[1] == "d2", "110 tokens fit exactly"
    cluster.client.hset(cluster.tag + "load", cluster.of("d1"), 40_000)
    assert cluster.place(100, output=10, random=chance)[1] == "d2", "where less is lacking"


def test_a_dead_routers_charges_are_dropped_by_the_next_placement(cluster):
    cluster.settle({cluster.of("p1"): 500, cluster.of("d1"): 600}, router="dead", number=1)
    cluster.expire("dead")
    p, d = cluster.place(100)
    assert cluster.load() == {cluster.of(p): 100, cluster.of(d): 110}
    for name in ("chg:dead", "answers:dead"):
        assert not cluster.client.exists(cluster.tag + name)
    assert cluster.client.zscore(cluster.tag + "routers", "dead") is None


def test_each_placement_drops_one_dead_router_and_no_living_one(cluster):
    for router in ("a", "b", "living"):
        cluster.settle({cluster.of("p1"): 500}, router=router, number=1)
    for router in ("a", "b"):
        cluster.expire(router)
    cluster.place(0, output=0)
    assert cluster.load()[cluster.of("p1")] == 1000
    cluster.place(0, output=0)
    assert cluster.load()[cluster.of("p1")] == 500


def test_a_router_that_only_places_has_a_lease(cluster):
    """It may die before it settles."""
    cluster.place(100)
    ends = cluster.client.zscore(cluster.tag + "routers", "router")
    assert ends is not None and ends > cluster.client.time()[0] * 1000
    cluster.settle({}, lease=10 * LEASE_MS)
    renewed = cluster.client.zscore(cluster.tag + "routers", "router")
    cluster.place(100)
    assert cluster.client.zscore(cluster.tag + "routers", "router") == renewed, (
        "a placement does not shorten it"
    )


def test_a_repeated_placement_is_charged_once_and_answered_the_same(cluster):
    first = cluster.place(100, number=7)
    load, calls = cluster.load(), cluster.client.get(cluster.tag + "calls")
    assert cluster.place(100, number=7, random=0.999) == first
    assert (cluster.load(), cluster.client.get(cluster.tag + "calls")) == (load, calls)


def test_answers_are_bounded(cluster):
    for number in range(1, 300):
        cluster.place(1, number=number)
    assert cluster.client.hlen(cluster.tag + "answers:router") == 256 + 1  # and whose they are


def test_answers_are_bounded_where_every_third_call_is_refused(cluster):
    drains = keys.drains(cluster.namespace)
    for number in range(1, 600):
        if number % 3 == 0:
            cluster.client.hset(drains, mapping=dict.fromkeys(cluster.by_id, "process:exit"))
        placed = cluster.place(1, number=number)
        assert (placed == LEAVING) == (cluster.client.delete(drains) > 0)
    assert cluster.client.hlen(cluster.tag + "answers:router") <= 256 + 1


def test_an_answer_is_given_to_the_call_of_its_number_only(cluster):
    cluster.place(100, number=7)
    load = sum(cluster.load().values())
    cluster.place(100, number=7 + 256)
    assert sum(cluster.load().values()) == 2 * load


def test_a_placement_that_the_router_gave_up_is_void(cluster):
    cluster.settle({}, oldest=5)
    assert cluster.place(100, number=4) == VOID
    assert cluster.load() == {}
    assert cluster.place(100, number=5) != VOID


def test_a_placement_of_an_earlier_run_is_void_and_one_of_a_later_run_is_not(cluster):
    cluster.place(100, number=1)
    cluster.settle({}, run=3, number=1)
    assert cluster.place(100, number=2) == VOID, "of run 1"
    for cluster.run in (3, 4):
        for number in (1, 2):
            assert cluster.place(100, number=number) != VOID, (
                "Redis was rolled back: run 3's numbers mean nothing"
            )
    assert sum(cluster.load().values()) == 4 * 210


# --- settling ---------------------------------------------------------------------------------------------------


def test_a_table_replaces_the_one_before(cluster):
    cluster.settle({"p:a": 100, "d:a": 50})
    cluster.settle({"p:a": 70, "d:b": 5})
    assert cluster.load() == {"p:a": 70, "d:b": 5}
    cluster.settle({"p:a": 70, "d:b": 5}, router="other", number=1)
    assert cluster.load() == {"p:a": 140, "d:b": 10}
    cluster.settle({})
    cluster.settle({}, router="other", number=2)
    assert cluster.load() == {}, "a field without load is gone"
    assert not cluster.client.exists(cluster.tag + "chg:router")


def test_a_table_that_was_applied_or_is_older_changes_nothing(cluster):
    assert cluster.settle({"p:a": 10}, number=3) == 0
    assert cluster.settle({"p:a": 99}, number=3) == 0
    assert cluster.settle({"p:a": 99}, number=2) == 0
    assert cluster.load() == {"p:a": 10}


def test_run_numbers_increase_and_an_earlier_run_is_refused(cluster):
    first = cluster.settle({"p:a": 1}, run=0)
    assert first > 0 and cluster.load() == {}, "that asks for a run only"
    assert cluster.settle({"p:a": 10}, run=first, number=1) == 0
    second = cluster.settle({}, run=0)
    assert second > first
    assert cluster.settle({"p:a": 99}, run=first, number=2) == -1
    assert cluster.load() == {"p:a": 10}
    assert cluster.settle({"p:a": 20}, run=second, number=1) == 0
    assert cluster.load() == {"p:a": 20}
    cluster.client.set(cluster.tag + "runs", 0)  # Redis was rolled back
    assert cluster.settle({}, run=0) > second


def test_a_run_that_was_given_out_and_never_used_is_forgotten(cluster):
    cluster.settle({}, run=0, router="dead")
    assert cluster.client.zscore(cluster.tag + "routers", "dead") is not None
    cluster.expire("dead")
    cluster.settle({})
    assert not cluster.client.exists(cluster.tag + "answers:dead")


def test_a_dead_routers_charges_are_dropped_by_the_next_table(cluster):
    cluster.settle({"p:a": 500}, router="dead", number=1)
    cluster.settle({"p:a": 7}, router="living", number=1)
    cluster.expire("dead")
    cluster.settle({"p:a": 10})
    assert cluster.load() == {"p:a": 17}
    for name in ("chg:dead", "answers:dead"):
        assert not cluster.client.exists(cluster.tag + name)
    assert cluster.client.zscore(cluster.tag + "routers", "dead") is None


def test_a_router_whose_lease_ran_out_returns_with_its_table(cluster):
    cluster.settle({"p:a": 10})
    cluster.expire("router")
    cluster.settle({"p:a": 10})
    assert cluster.load() == {"p:a": 10}, "a late beat is no death"
    cluster.expire("router")
    cluster.settle({}, router="other", number=1)
    assert cluster.load() == {}
    cluster.settle({"p:a": 10}, number=9)
    assert cluster.load() == {"p:a": 10}
