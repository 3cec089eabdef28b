"""What the script takes from the heads of the sorted sets and from the holders of a prefix, where that must not be the
first or the one with most of it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from cluster.membership import keys, scripts
from cluster.membership.facts import pack
from cluster.membership.registry import encode
from cluster.protocol.times import LEASE_SUSPECT_SECONDS
from cluster.redis.connect import connect
from router.placement.placement import Placement
from router.placement.types import Placed, PlacementRequest, Reason
from tests.router.placement.fleets import request
from tests.router.placement.regret import FILL

PAIRS = 100
CHAIN = random.Random(3).randbytes(8 * 100)


@pytest.fixture
async def large(make: Any, redis_url: str, namespace: str) -> Placement:
    """Decode workers may prefill where no prefill worker may."""
    placement: Placement = await make(PAIRS, "fallback")
    parts = ((one.name, 0, 0, pack(one), one.slot) for one in placement._members.all)
    with connect(redis_url) as client:
        client.eval(FILL, 0, f"{{{namespace}}}:", *(part for one in parts for part in one))
    return placement


async def place(placement: Placement, one: PlacementRequest) -> Placed:
    placed = await placement.place(replace(one, chain=CHAIN, token_count=1700))
    placement.release(one.transfer_id)
    await placement.settlement.settle()
    assert placed.from_redis
    return placed


def reads_of(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Of the membership, from now on."""
    read: list[None] = []

    async def refresh() -> None:
        read.append(None)

    monkeypatch.setattr(placement._members, "refresh", refresh)
    return read


async def test_a_holder_is_not_taken_where_its_whole_role_is_excluded(large: Placement) -> None:
    first = await place(large, request())
    assert first.prefill is not None
    assert (await place(large, request())).prefill == first.prefill, "it holds the prefix"
    excluded = [f"prefill-{n}" for n in range(PAIRS)]
    assert (await place(large, request(*excluded))).prefill is None


async def test_a_holder_that_was_just_told_to_drain_is_not_taken(
    large: Placement, redis_url: str, namespace: str
) -> None:
    """It left the sets; the index still names it, and this router has not read of it yet."""
    first = await place(large, request())
    assert first.prefill is not None
    with connect(redis_url) as client:
        client.hset(keys.members(namespace), first.prefill.worker_id, encode(first.prefill))
        registry = keys.registry(namespace)
        assert client.eval(scripts.DRAIN, len(registry), *registry, first.prefill.worker_id, "exit") == 1
    again = await place(large, request())
    assert again.prefill not in (None, first.prefill)


async def test_where_every_worker_lacks_the_adapter_one_call_places(
    large: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passing over all of them would find no worker, and the membership would be read for each request."""
    read = reads_of(large, monkeypatch)
    lacking = {one.worker_id: Reason.ADAPTER for one in large._members.all}
    for _ in range(3):
        assert (await place(large, replace(request(), excluded=lacking))).from_redis
    assert not read


async def test_a_worker_whose_lease_is_overdue_gets_nothing_and_stays_in_its_sets(
    large: Placement, redis_url: str, namespace: str
) -> None:
    """It may only be late: it is removed once it counts as dead."""
    first = await place(large, request())
    assert first.prefill is not None
    with connect(redis_url) as client:
        overdue = client.time()[0] * 1000 - int(LEASE_SUSPECT_SECONDS * 1000) - 100
        client.zadd(keys.leases(namespace), {first.prefill.worker_id: overdue})
        before = client.get(keys.generation(namespace))
        assert (await place(large, request())).prefill not in (None, first.prefill)
        assert client.get(keys.generation(namespace)) == before
        sets = client.keys(f"{{{namespace}}}:set:*")
        assert any(client.zscore(name, first.prefill.name) is not None for name in sets)


async def test_where_every_lease_is_overdue_one_call_places(
    large: Placement, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sets name no live worker, so the router names some at once."""
    read = reads_of(large, monkeypatch)
    with connect(redis_url) as client:
        client.zadd(keys.leases(namespace), {one.worker_id: 1 for one in large._members.all})
    members: Any = large._members
    members.all = [replace(one, lease="dead") for one in members.all]
    for _ in range(3):
        await place(large, request())
    assert not read
