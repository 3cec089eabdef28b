"""Of a large fleet the script reads the first of each sorted set, and finds better ones behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis

from cluster.membership.facts import pack
from cluster.membership.topology import Location
from tests.harness.place_call import PlaceCall
from tests.router.placement.head_fleet import COUNT, ROLES, Fleet, worker
from tests.router.placement.regret import FILL


@pytest.fixture
def fleet(redis_url: str, namespace: str) -> Iterator[Fleet]:
    with redis.Redis.from_url(redis_url) as client:
        yield Fleet(client, PlaceCall(namespace))


@pytest.fixture
def slow(fleet: Fleet) -> Fleet:
    """A fleet in which the hand-off costs most."""
    fleet.call = replace(fleet.call, token_bytes=1e6, bandwidths=(1e12, 1e12, 1e8, 1e8, 1e8))
    return fleet


def test_a_pair_that_lies_together_is_found_where_the_hand_off_costs_most(slow):
    """Twelve of either role have less to do than those of the only host that has both."""
    both = Location(host="both")
    workers = [
        replace(one, location=both, place=both.place) if one.worker_id.endswith("-12") else one
        for one in (worker(role, number) for role in ROLES for number in range(COUNT))
    ]
    slow.fill(workers)
    assert slow.place() == ("prefill-12", "decode-12")


@pytest.mark.parametrize("roomy", [20, 40])
def test_a_decode_worker_with_room_is_found_behind_smaller_ones_with_less_load(fleet, roomy):
    workers = [worker(role, number) for role in ROLES for number in range(COUNT)]
    small = [replace(one, blocks_total=4) if one.role == "decode" else one for one in workers]
    small[COUNT + roomy] = workers[COUNT + roomy]
    fleet.fill(small)
    assert fleet.place()[1] == f"decode-{roomy}"


def test_looks_behind_the_heads_that_find_nothing_become_rare(slow):
    workers = [worker(role, number) for role in ROLES for number in range(COUNT)]
    slow.fill(workers)
    wide = [slow.sets_read() > COUNT for _ in range(32)]
    assert wide[0] and sum(wide) <= 3 + 32 // 8 and any(wide[-8:])
    both = Location(host="both")
    for at in (30, COUNT + 30):
        workers[at] = replace(workers[at], location=both, place=both.place)
    slow.fill(workers)
    assert any(slow.place() == ("prefill-30", "decode-30") for _ in range(8))
    assert slow.sets_read() > COUNT, "one that has found something is followed by another"


def test_many_workers_may_be_passed_over_in_many_places(slow):
    """The first of each place are passed over, which all have more workers than that; nobody lies nearer than another."""
    slow.call = replace(slow.call, bandwidths=(1e12, 1e8, 1e8, 1e8, 1e8))
    places, in_each, passed = 33, 300, 9
    hosts = [Location(host=f"host-{number}") for number in range(places)]
    prefill = [
        replace(worker("prefill", at), location=host, place=host.place) for at, host in enumerate(hosts)
    ]
    decode = [
        replace(worker("decode", 10_000 + places * n + at), location=host, place=host.place)
        for n in range(in_each)
        for at, host in enumerate(hosts)
    ]
    slow.fill([*prefill, *decode])
    first = [one.name for one in decode[: passed * places]]
    assert slow.place(first)[1] not in {name.split("@")[0] for name in first}


def test_of_an_idle_fleet_chance_decides_and_not_the_names(fleet: Fleet) -> None:
    """The heads are the first by name where all are equal."""
    workers = [worker(role, number) for role in ROLES for number in range(COUNT)]
    parts = [(one.name, 0, 0, pack(one), one.slot) for one in workers]
    found = set()
    for number in range(40):
        fleet.client.eval(FILL, 0, f"{{{fleet.call.namespace}}}:", *(part for one in parts for part in one))
        fleet.call = replace(fleet.call, random=number / 40)
        found.add(fleet.place()[0])
    assert len(found) > 16, "more than the first eight"
