"""Every condition of `place.lua` and `settle.lua` in a real Redis, called as a router calls them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import redis

from cluster.config.router import RouterConfig
from cluster.membership import keys
from cluster.membership.facts import group_id, pack
from cluster.membership.scripts import SETS
from cluster.membership.types import WorkerInfo
from router.placement import table_walk
from router.placement.candidates import Candidates
from router.placement.charges import AttemptCharge, Charges
from router.placement.keys import PlacementKeys
from router.placement.place_script import script_source
from router.placement.settlement import Settlement, settle_source
from router.placement.types import PlacementRequest, PriorityClass
from tests.harness.place_call import PlaceCall, decision
from tests.harness.redis_text import decoded

INFO = WorkerInfo("", 1, 0, "prefill", "m", "h:1", "", b"", "", "h", 4096, 1000)
PREDICT_MS, TTL_MS, LEASE_MS = 10_000, 3_600_000, 60_000
LEAVING, OTHER_LIFE, VOID = -4, -5, -7
LATER_RUN, LOST_TABLE = -1, -2


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
        candidates = Candidates(self.workers[:2], self.workers[2:])
        script_keys = PlacementKeys(self.namespace, self.router).place(self.run)
        number = next(self.numbers) if number is None else number
        call = PlaceCall(
            self.namespace, tokens=tokens, output=output, **{"transfer_id": b"t%d" % number, **more}
        )
        arguments = call.arguments(self.run, number, candidates)
        answer: Any = self.client.eval(script_source(), len(script_keys), *script_keys, *arguments)
        found = decision(answer)
        if isinstance(found, int):
            return found
        return tuple(name.partition("@")[0] for name in (found.prefill, found.decode))

    def settle(self, **more: Any) -> Settled:
        """One call of settle.lua; changes by the names of its arguments."""
        router, run = more.get("router", self.router), more.get("run", self.run)
        prefilled, released = more.get("prefilled", []), more.get("released", [])
        pairs = [part for one in more.get("added", {}).items() for part in one]
        number = more["number"] if "number" in more else next(self.tables)
        arguments = [
            *(
                router,
                more.get("lease", LEASE_MS),
                run,
                number,
                more.get("oldest", 0),
                more.get("cursor", ""),
            ),
            *(len(prefilled), len(released), *prefilled, *released, *pairs),
        ]
        script_keys = PlacementKeys(self.namespace, router).settle(run)
        answer = self.client.eval(settle_source(), len(script_keys), *script_keys, *arguments)
        if run == 0:
            return Settled(int(answer))
        return Settled(int(answer[0]), answer[1], answer[2], answer[3], answer[4:])

    def begin(self, router: str = "router") -> int:
        """Take a run, as a router does that starts."""
        run = self.settle(router=router, run=0, number=0).status
        self.settle(router=router, run=run, number=1)
        if router == self.router:
            self.run, self.tables = run, count(2)
        return run

    def table(self, router: str = "router", run: int | None = None) -> dict[bytes, bytes]:
        kept: Any = self.client.hgetall(PlacementKeys(self.namespace, router).charges(run or self.run))
        return dict(kept)

    def expire(self, router: str, run: int | None = None) -> None:
        """Its lease has run out."""
        self.client.zadd(self.tag + "routers", {f"{router}:{run or self.run}": 1})


@dataclass
class Settled:
    """settle.lua's answer; of a run that was asked for, only its number."""

    status: int
    skipped: int = 0
    more: int = 0
    cursor: bytes = b""
    ids: list[bytes] = field(default_factory=list)


def charge(p: str, d: str, prefill: int, decode: int, priority_class: PriorityClass = "normal") -> bytes:
    return AttemptCharge(p, d, prefill, decode, priority_class).packed


@pytest.fixture
def cluster(redis_url: str, namespace: str) -> Iterator[Cluster]:
    with redis.Redis.from_url(redis_url) as client:
        made = Cluster(client, namespace)
        made.begin()
        yield made


# --- placing ----------------------------------------------------------------------------------------------------


def test_a_placement_is_charged_to_both_and_to_the_routers_table(cluster):
    p, d = cluster.place(300, output=20, priority_class="batch", transfer_id=b"one")
    assert cluster.load() == {cluster.of(p): 300, f"batch:{cluster.of(p)}": 300, cluster.of(d): 320}
    names = cluster.by_id[p].name, cluster.by_id[d].name
    assert cluster.table() == {b"one": charge(*names, 300, 320, "batch")}


@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_that_was_asked_to_drain_gets_no_requests(cluster, index):
    chosen = cluster.place(transfer_id=b"one")
    cluster.settle(released=[b"one"])
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
    chosen = cluster.place(transfer_id=b"one")
    slot = str(cluster.by_id[chosen[index]].slot)
    cluster.settle(released=[b"one"])
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


def test_a_router_that_only_places_has_a_lease(cluster):
    """It may die before it settles."""
    cluster.run += 1
    cluster.place(100)
    lease = f"router:{cluster.run}"
    ends = cluster.client.zscore(cluster.tag + "routers", lease)
    assert ends is not None and ends > cluster.client.time()[0] * 1000
    cluster.client.zadd(cluster.tag + "routers", {lease: ends + 1000})
    cluster.place(100)
    assert cluster.client.zscore(cluster.tag + "routers", lease) == ends + 1000, (
        "a placement does not shorten it"
    )


def test_a_placement_does_not_shorten_the_lease_that_a_settlement_has_renewed(cluster):
    """Nor where Redis has lost the router's answers."""
    lease = f"router:{cluster.run}"
    ends = cluster.client.zscore(cluster.tag + "routers", lease) + 100_000
    cluster.client.zadd(cluster.tag + "routers", {lease: ends})
    cluster.client.delete(cluster.tag + "answers:router")
    cluster.place(100)
    assert cluster.client.zscore(cluster.tag + "routers", lease) == ends


def test_a_run_that_redis_did_not_give_out_gets_no_answers_of_the_one_before(cluster):
    for _ in range(2):
        for number in (7, 8):
            cluster.place(100, number=number, transfer_id=b"%d of %d" % (number, cluster.run))
        cluster.run += 1
    assert sum(cluster.load().values()) == 4 * 210


def test_a_repeated_placement_is_charged_once_and_answered_the_same(cluster):
    first = cluster.place(100, number=7)
    load, calls = cluster.load(), cluster.client.get(cluster.tag + "calls")
    assert cluster.place(100, number=7, random=0.999) == first
    assert (cluster.load(), cluster.client.get(cluster.tag + "calls")) == (load, calls)


def test_answers_are_bounded(cluster):
    for number in range(1, 300):
        cluster.place(1, number=number)
    assert cluster.client.hlen(cluster.tag + "answers:router") == 256 + 4  # and whose they are


def test_answers_are_bounded_where_every_third_call_is_refused(cluster):
    drains = keys.drains(cluster.namespace)
    for number in range(1, 600):
        if number % 3 == 0:
            cluster.client.hset(drains, mapping=dict.fromkeys(cluster.by_id, "process:exit"))
        placed = cluster.place(1, number=number)
        assert (placed == LEAVING) == (cluster.client.delete(drains) > 0)
    assert cluster.client.hlen(cluster.tag + "answers:router") <= 256 + 4


def test_an_answer_is_given_to_the_call_of_its_number_only(cluster):
    cluster.place(100, number=7)
    load = sum(cluster.load().values())
    cluster.place(100, number=7 + 256)
    assert sum(cluster.load().values()) == 2 * load


def test_a_placement_that_the_router_gave_up_is_void(cluster):
    cluster.settle(oldest=5)
    assert cluster.place(100, number=4) == VOID
    assert cluster.load() == {}
    assert cluster.place(100, number=5) != VOID


def test_a_placement_that_the_router_made_by_itself_meanwhile_is_void(cluster):
    cluster.settle(added={b"one": charge("p", "d", 5, 15)})
    assert cluster.place(100, transfer_id=b"one") == VOID
    assert cluster.load() == {"p:p": 5, "d:d": 15}


def test_a_placement_replaces_the_charge_of_its_former_call_and_no_other(cluster):
    former = charge("p", "d", 5, 15, "high")
    cluster.settle(added={b"one": former})
    assert cluster.place(100, transfer_id=b"one", replaces=OTHER) == VOID
    assert cluster.place(100, transfer_id=b"one", replaces=former) == ("p1", "d1")
    assert cluster.load() == {cluster.of("p1"): 100, cluster.of("d1"): 110}
    cluster.settle(released=[b"one"])
    assert cluster.load() == {}


def test_a_placement_of_an_earlier_run_is_void_and_one_of_a_later_run_is_not(cluster):
    cluster.place(100)
    earlier = cluster.run
    later = cluster.begin()
    cluster.run = earlier
    assert cluster.place(100) == OTHER_LIFE
    for cluster.run in (later, later + 1):
        assert cluster.place(100) != OTHER_LIFE, (
            "Redis was rolled back: the numbers of the run before mean nothing"
        )
    assert sum(cluster.load().values()) == 2 * 210, "the charges of the earlier run are gone"


# --- settling ---------------------------------------------------------------------------------------------------

ONE = charge("p", "d", 100, 150)
OTHER = charge("p", "e", 7, 9, "high")


def test_changes_by_id_are_applied_once_in_any_order(cluster):
    cluster.settle(added={b"1": ONE, b"2": OTHER})
    both = {"p:p": 107, "high:p:p": 7, "d:d": 150, "d:e": 9}
    assert cluster.load() == both
    cluster.settle(added={b"1": ONE})
    assert cluster.load() == both
    for _ in range(2):
        cluster.settle(prefilled=[b"2", b"unknown"])
        assert cluster.load() == {"p:p": 100, "d:d": 150, "d:e": 9}
    for _ in range(2):
        cluster.settle(released=[b"1", b"unknown"])
        assert cluster.load() == {"d:e": 9}
    cluster.settle(prefilled=[b"1"])
    cluster.settle(released=[b"2"])
    assert cluster.load() == {}, "a field without load is gone"
    assert not cluster.table()


def test_a_charge_that_is_added_replaces_the_one_before(cluster):
    cluster.settle(added={b"1": ONE})
    cluster.settle(added={b"1": OTHER})
    assert cluster.load() == {"p:p": 7, "high:p:p": 7, "d:e": 9}


def test_a_call_that_was_applied_or_is_older_changes_nothing(cluster):
    assert cluster.settle(added={b"1": ONE}, number=30).status == 0
    for number in (30, 29):
        assert cluster.settle(released=[b"1"], number=number).status == 0
    assert cluster.load() == {"p:p": 100, "d:d": 150}


def test_run_numbers_increase_and_an_earlier_run_is_refused(cluster):
    first = cluster.run
    cluster.settle(added={b"1": ONE})
    second = cluster.settle(run=0, number=0).status
    assert second > first
    assert cluster.load() == {"p:p": 100, "d:d": 150}, "that asks for a run only"
    assert cluster.settle(run=first, released=[b"1"]).status == LATER_RUN
    assert cluster.load() == {"p:p": 100, "d:d": 150}
    assert cluster.settle(run=second, number=1, added={b"1": OTHER}).status == 0
    assert cluster.load() == {"p:p": 7, "high:p:p": 7, "d:e": 9}, "the first run has ended"
    cluster.client.set(cluster.tag + "runs", 0)  # Redis was rolled back
    assert cluster.settle(run=0, number=0).status > second


def test_a_run_that_was_given_out_and_never_used_is_forgotten(cluster):
    run = cluster.settle(run=0, number=0, router="dead").status
    assert cluster.client.zscore(cluster.tag + "routers", f"dead:{run}") is not None
    cluster.expire("dead", run)
    cluster.settle()
    assert not cluster.client.exists(cluster.tag + "answers:dead")


def test_a_table_that_redis_does_not_have_is_asked_for(cluster):
    cluster.client.delete(cluster.tag + "answers:router")
    assert cluster.settle(added={b"1": ONE}).status == LOST_TABLE
    cluster.place(100)
    assert cluster.settle(added={b"1": ONE}).status == LOST_TABLE, "a placement alone makes no table"
    assert "p:p" not in cluster.load()


def test_a_dead_routers_charges_are_dropped_by_the_next_call(cluster):
    run = cluster.begin("dead")
    cluster.settle(router="dead", run=run, added={b"1": ONE})
    cluster.settle(added={b"1": OTHER})
    cluster.expire("dead", run)
    assert cluster.settle().more == 0
    assert cluster.load() == {"p:p": 7, "high:p:p": 7, "d:e": 9}
    assert not cluster.table("dead", run)
    assert not cluster.client.exists(cluster.tag + "answers:dead")
    assert cluster.client.zscore(cluster.tag + "routers", f"dead:{run}") is None


def test_a_dead_routers_many_charges_are_dropped_some_a_call(cluster):
    run = cluster.begin("dead")
    for first in range(0, 3000, 500):
        many = {b"%d" % n: charge("p" * 40, "d" * 40, 1, 2) for n in range(first, first + 500)}
        cluster.settle(router="dead", run=run, number=2 + first, added=many)
    cluster.expire("dead", run)
    left, calls = 3000, 0
    while cluster.settle().more:
        assert calls < 100
        now = len(cluster.table("dead", run))
        assert left - now <= 400, "one call holds Redis for a short time"
        left, calls = now, calls + 1
        if calls == 3:  # it comes back meanwhile
            assert cluster.settle(router="dead", run=run, number=9999).status == LOST_TABLE
    assert calls > 3000 // 400 and cluster.load() == {}


def test_a_dead_router_of_an_earlier_version_leaves_nothing(cluster):
    """Its table has amounts by field of the load."""
    cluster.settle(added={b"1": ONE})
    cluster.client.hset(cluster.tag + "chg:old", mapping={"p:p": 11, "d:d": 12})
    for name, amount in (("p:p", 11), ("d:d", 12)):
        cluster.client.hincrby(cluster.tag + "load", name, amount)
    cluster.client.zadd(cluster.tag + "routers", {"old": 1})
    assert cluster.settle().skipped == 0
    assert cluster.load() == {"p:p": 100, "d:d": 150}
    assert not cluster.client.exists(cluster.tag + "chg:old")


@pytest.mark.parametrize("foreign", [b"", b"\x02later", ONE[:-3], b"\x01"])
def test_what_is_no_charge_is_skipped_and_counted(cluster, foreign):
    key = PlacementKeys(cluster.namespace, "router").charges(cluster.run)
    cluster.settle(added={b"1": ONE, b"2": OTHER})
    cluster.client.hset(key, b"strange", foreign)
    assert cluster.settle(prefilled=[b"strange", b"1"]).skipped == 1
    assert cluster.settle(released=[b"strange", b"1"]).skipped == 1
    assert cluster.load() == {"p:p": 7, "high:p:p": 7, "d:e": 9}
    assert list(cluster.table()) == [b"2"]
    cluster.client.hset(key, b"strange", foreign)
    cluster.expire("router")
    other = cluster.begin("other")
    assert not cluster.table() and cluster.load() == {}
    assert cluster.settle(router="other", run=other, number=5).skipped == 0


def test_the_charges_of_a_dead_router_of_a_later_version_are_taken_off(cluster):
    """Its format has more fields."""
    run = cluster.begin("dead")
    cluster.settle(router="dead", run=run, added={b"1": ONE, b"2": OTHER})
    table = PlacementKeys(cluster.namespace, "dead").charges(run)
    cluster.client.hset(table, mapping={b"1": b"\x02" + ONE[1:] + b"more", b"2": b"\x1f" + OTHER[1:]})
    cluster.expire("dead", run)
    assert cluster.settle().skipped == 0
    assert cluster.load() == {} and not cluster.table("dead", run)


def test_a_table_that_is_no_hash_stops_no_router(cluster):
    cluster.settle(added={b"1": ONE})
    for foreign in ("c:1", "no run"):
        cluster.client.set(cluster.tag + "chg:" + foreign, "x")
        cluster.client.set(cluster.tag + "answers:" + foreign.partition(":")[0], "x")
        cluster.client.zadd(cluster.tag + "routers", {foreign: 1})
    assert cluster.settle(added={b"2": OTHER}).more == 1
    assert cluster.settle().more == 0
    assert cluster.load() == {"p:p": 107, "high:p:p": 7, "d:d": 150, "d:e": 9}
    assert cluster.client.zcard(cluster.tag + "routers") == 1
    assert not list(cluster.client.scan_iter(cluster.tag + "chg:c*"))


def test_a_router_whose_lease_ran_out_returns(cluster):
    cluster.settle(added={b"1": ONE})
    cluster.expire("router")
    cluster.settle()
    assert cluster.load() == {"p:p": 100, "d:d": 150}, "a late beat is no death"
    cluster.expire("router")
    cluster.begin("other")
    assert cluster.load() == {}
    assert cluster.settle(added={b"1": ONE}).status == LOST_TABLE
    cluster.begin()
    cluster.settle(added={b"1": ONE})
    assert cluster.load() == {"p:p": 100, "d:d": 150}


def test_a_walk_finds_every_charge_in_bounded_steps(cluster):
    names = {b"%04d" % n: charge("p" * 40, "d" * 40, 1, 2) for n in range(2000)}
    items = list(names.items())
    for first in range(0, 2000, 500):
        cluster.settle(added=dict(items[first : first + 500]))
    cursor, found, steps = b"0", set(), 0
    while cursor != b"0" or not steps:
        step = cluster.settle(cursor=cursor)
        assert len(step.ids) <= 600
        cursor, steps = step.cursor, steps + 1
        found |= set(step.ids)
    assert found == set(names) and steps >= 4


def test_scores_follow_the_load_and_never_bring_back_a_worker_that_left(cluster):
    client, tag = cluster.client, cluster.tag
    p, d = cluster.by_id["p1"], cluster.by_id["d1"]
    for one in (p, d):
        client.eval(
            SETS + "redis.call('HSET', ARGV[1]..'facts', ARGV[2], ARGV[3]) enter(ARGV[1], ARGV[2], ARGV[3])",
            *(0, tag, one.name, pack(one)),
        )
    sets = f"{tag}set:{group_id('m', 16, b'').decode()}:"

    def scores() -> list[float | None]:
        return [
            client.zscore(sets + kind, one.name) for kind, one in (("p", p), ("r", d), ("f", d), ("l", d))
        ]

    cluster.settle(added={b"1": charge(p.name, d.name, 100, 150), b"2": charge(d.name, d.name, 7, 9)})
    assert scores() == [100, 159, 159 - 16_000, 7]
    cluster.settle(prefilled=[b"2"])
    cluster.settle(released=[b"1"])
    assert scores() == [0, 9, 9 - 16_000, 0]
    for one in (p, d):
        client.eval(SETS + "exit(ARGV[1], ARGV[2], ARGV[3])", 0, tag, one.name, pack(one))
    cluster.settle(released=[b"2"])
    assert scores() == [None] * 4
    assert not client.keys(sets + "*")


# --- a router's side --------------------------------------------------------------------------------------------


async def test_a_table_of_thousands_is_sent_once_and_in_parts(redis_url, namespace):
    """Also where Redis loses it, and then nothing is sent again and again."""
    config = RouterConfig(model=Path("/m"), redis_url=redis_url, namespace=namespace)
    charges = Charges()
    settlement = Settlement(config, PlacementKeys(namespace, config.router_id), charges)
    sent: list[int] = []
    send = settlement._script

    async def counted(script_keys: Any, arguments: Any, seconds: float) -> Any:
        sent.append(len(arguments))
        return await send(script_keys, arguments, 60.0)

    with mock.patch.object(settlement, "_script", counted):
        for _ in range(2):
            for number in range(3000):
                request = PlacementRequest(b"%016d" % number, b"", 100, 10)
                charges.add(request, INFO, INFO, 100, in_redis=False)
            while charges.pending:
                await settlement.settle()
            assert max(sent) < 400
            sent.clear()
            await settlement.settle()
            assert sent == [8], "nothing is pending, so nothing is sent"
            with redis.Redis.from_url(redis_url) as client:
                client.delete(*client.keys(f"{{{namespace}}}:*"))
            for _ in range(40):
                await settlement.settle()
            assert sum(sent) < 2.5 * 3000, "each charge once"
            sent.clear()
            with redis.Redis.from_url(redis_url) as client:
                assert int(client.hget(f"{{{namespace}}}:load", "p:" + INFO.name) or 0) == 300_000
    await send.close()


@pytest.fixture
def walked(redis_url, namespace, monkeypatch):
    monkeypatch.setattr(table_walk, "WALK_SECONDS", 0.0)
    config = RouterConfig(model=Path("/m"), redis_url=redis_url, namespace=namespace)
    return Settlement(config, PlacementKeys(namespace, config.router_id), Charges())


async def test_a_walk_heals_what_redis_has_too_much_and_too_little(walked, redis_url, namespace):
    """As after a rollback: no call tells the router of it."""
    for number in range(3):
        request = PlacementRequest(b"%d" % number, b"", 100, 10)
        walked._charges.add(request, INFO, INFO, 100, in_redis=False)
    await walked.settle()
    key = walked._keys.charges(walked.run)
    with redis.Redis.from_url(redis_url) as client:
        client.hdel(key, b"1")
        client.hset(key, b"stale", ONE)
        client.hset(key, b"awaited", ONE)
        number = walked.begin_placement(b"awaited")
        for _ in range(3):
            await walked.settle()
        assert set(client.hgetall(key)) == {b"0", b"1", b"2", b"awaited"}
        walked.end_placement(number, heard=False)
        for _ in range(3):
            await walked.settle()
        assert set(client.hgetall(key)) == {b"0", b"1", b"2"}
    await walked._script.close()
