"""Every condition of `settle.lua`, and what a router settles by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import redis

from cluster.config.router import RouterConfig
from cluster.membership.facts import group_id, pack
from cluster.membership.scripts import SETS
from router.placement import settlement, table_walk
from router.placement.charges import Charges
from router.placement.keys import PlacementKeys
from router.placement.settlement import Settlement
from router.placement.types import PlacementRequest
from tests.harness.waiting import until
from tests.router.placement.scripts import (
    INFO,
    LATER_RUN,
    LOST_TABLE,
    ONE,
    OTHER,
    charge,
)


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


def test_a_lease_in_the_future_runs_out_from_now_on(cluster):
    """After a failover to a Redis whose clock is behind; its router has died meanwhile."""
    run, routers = cluster.begin("dead"), cluster.tag + "routers"
    cluster.settle(router="dead", run=run, number=2, added={b"1": ONE})
    seconds, _ = cluster.client.time()
    cluster.client.zadd(routers, {f"dead:{run}": seconds * 1000 + 3_600_000})
    cluster.settle(cursor="0", lease=1000)
    ends, (seconds, micros) = cluster.client.zscore(routers, f"dead:{run}"), cluster.client.time()
    assert seconds * 1000 - 60_000 < ends <= seconds * 1000 + micros // 1000 + 1000
    assert cluster.load() == {"p:p": 100, "d:d": 150}, "its lease has not run out yet"


def test_a_walk_does_not_show_what_its_own_call_releases(cluster):
    """It would be released once more, by a call of its own."""
    cluster.settle(added={b"1": ONE, b"2": OTHER})
    assert cluster.settle(cursor="0", released=[b"1"]).ids == [b"2"]


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
        walked.end_placement(number, answered=False)
        for _ in range(3):
            await walked.settle()
        assert set(client.hgetall(key)) == {b"0", b"1", b"2"}
    await walked._script.close()


async def away(*_: Any) -> Any:
    raise TimeoutError("Redis did not answer in time")


async def test_what_ends_while_redis_is_away_for_long_is_not_kept(walked, redis_url, namespace, monkeypatch):
    """A day at 100 requests a second were gigabytes, and each try to settle went through all calls that were lost."""
    monkeypatch.setattr(settlement, "MAX_UNCONFIRMED", 100)
    charges = walked._charges

    def placed(number: int) -> PlacementRequest:
        request = PlacementRequest(b"%d" % number, b"", 100, 10)
        charges.add(request, INFO, INFO, 100, in_redis=False)
        return request

    lives = placed(0)
    await walked.settle()
    with mock.patch.object(walked, "_script", away):
        for number in range(1, 1000):
            walked.end_placement(walked.begin_placement(b"lost %d" % number), answered=False)
            charges.release(placed(number).transfer_id)
            if number % 10 == 0:
                await walked.settle()
                assert charges.unconfirmed <= 110 and len(walked._calls.unanswered) <= 110
    while charges.pending:
        await walked.settle()
    with redis.Redis.from_url(redis_url) as client:
        load = {name: int(held) for name, held in client.hgetall(walked._keys.load).items() if name}
        assert load == {b"p:" + INFO.name.encode(): 100, b"d:" + INFO.name.encode(): 110}
        assert len(client.keys(f"{{{namespace}}}:chg:*")) == 1, "the table of the run before is dropped"
    charges.release(lives.transfer_id)
    await walked.settle()
    await walked._script.close()


async def test_an_error_that_nobody_expects_ends_no_settling(walked, monkeypatch, caplog):
    """Such as: the system has no thread left, with which the master is looked for."""
    monkeypatch.setattr(settlement, "ROUTER_LEASE_SECONDS", 0.5)
    await walked.start()
    asked, script = [], walked._script

    async def once(*arguments: Any) -> Any:
        asked.append(arguments)
        if len(asked) == 1:
            raise RuntimeError("can't start new thread")
        return await script(*arguments)

    with mock.patch.object(walked, "_script", once):
        walked.request()
        await until(lambda: len(asked) > 1, "it settles again")
    await walked.close()
    assert "can't start new thread" in caplog.text


async def test_two_routers_with_one_id_say_so_once_a_minute(redis_url, namespace, caplog):
    """Each settling takes the id over from the other."""
    config = RouterConfig(model=Path("/m"), redis_url=redis_url, namespace=namespace)
    both = [Settlement(config, PlacementKeys(namespace, config.router_id), Charges()) for _ in range(2)]
    for _ in range(10):
        for one in both:
            await one.settle()
    assert 1 <= caplog.text.count("Give each router its own router_id") <= 2
    for one in both:
        await one._script.close()
