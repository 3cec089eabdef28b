"""Every condition of `place.lua`."""

from __future__ import annotations

import pytest

from cluster.membership import keys
from tests.router.placement.scripts import (
    LEAVING,
    OTHER,
    OTHER_LIFE,
    VOID,
    charge,
)


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


@pytest.mark.parametrize("role", ["p", "d"])
def test_a_load_below_zero_counts_as_none(cluster, role):
    """As where a part of Redis was lost: the worker would get every request, whatever it has."""
    cluster.client.hset(cluster.tag + "load", cluster.of(f"{role}1"), -(10**9))
    found = {cluster.place(random=chance / 10, per_token=1e-3)[role == "d"] for chance in range(1, 10)}
    assert found == {f"{role}1", f"{role}2"}
