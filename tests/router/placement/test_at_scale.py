"""The cost of a request for router and Redis with many workers or many concurrent requests, counted in operations."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from cluster.membership import keys
from cluster.membership.facts import pack
from cluster.membership.scripts import SETS
from cluster.membership.types import WorkerInfo
from cluster.redis.connect import connect
from router.placement import eligibility
from router.placement.candidates import Candidates, Heads
from router.placement.charges import Charges
from router.placement.eligibility import MAX_CANDIDATES_KEPT, MAX_LISTED, MAX_SAMPLED
from router.placement.kv_groups import kv_group_of
from router.placement.placement import Placement
from router.placement.types import Placed, PlacementRequest
from tests.harness.redis_text import decoded
from tests.router.placement.fleets import fleet, request
from tests.router.placement.regret import FILL


async def test_a_suspect_does_not_make_every_request_rebuild_the_candidates(make, monkeypatch):
    placement, built = await make(4), []
    build = Candidates

    def counted(*arguments: Any, **more: Any) -> Any:
        built.append(arguments)
        return build(*arguments, **more)

    monkeypatch.setattr(eligibility, "Candidates", counted)
    suspect = f"prefill-0@{1:016x}"
    for _ in range(20):
        placed = await placement.place(request(suspect))
        assert placed.prefill is not None and placed.prefill.worker_id != "prefill-0"
    assert len(built) == 1
    for number in range(100):  # failed requests, each with another exclusion
        await placement.place(request(f"decode-{number}"))
    assert len(placement.eligibility._kept) <= MAX_CANDIDATES_KEPT, "what is kept has a bound"


def register(client: Any, namespace: str, workers: list[WorkerInfo]) -> None:
    """As workers do, in one call."""
    parts = ((one.name, 0, 0, pack(one), one.slot) for one in workers)
    client.eval(FILL, 0, f"{{{namespace}}}:", *(part for one in parts for part in one))


def call_of(placement: Placement, one: PlacementRequest) -> int:
    """How many arguments of its own the call for a request has."""
    return len(placement.eligibility.for_script(one, listed=False).arguments)


@pytest.fixture
async def many(make, redis_url, namespace):
    """A router of 300 + 300 registered workers."""
    placement = await make(300)
    with connect(redis_url) as client:
        register(client, namespace, placement._members.all)
    return placement


async def test_of_many_workers_a_call_names_only_those_to_pass_over(many):
    assert call_of(many, request()) < 12
    assert call_of(many, request("decode-1", "prefill-2")) < 12
    seen = [await many.place(request()) for _ in range(40)]
    assert all(placed.from_redis for placed in seen)
    assert len({placed.prefill.worker_id for placed in seen}) == 40, "each goes where no other waits"
    assert len({placed.decode.worker_id for placed in seen}) == 40


async def test_what_is_passed_over_is_put_together_once_for_the_same_exclusions(many, monkeypatch):
    built: list[Any] = []

    class Counted(Heads):
        def __init__(self, *arguments: Any, **more: Any):
            built.append(arguments)
            super().__init__(*arguments, **more)

    monkeypatch.setattr(eligibility, "Heads", Counted)
    for _ in range(5):
        assert (await many.place(request("prefill-0"))).from_redis
    assert len(built) == 1


@pytest.mark.parametrize("count", [1, 8, 70, 299, 300])
async def test_excluded_workers_of_many_get_nothing_while_others_are_left(many, count):
    out = [f"{role}-{n}" for role in ("prefill", "decode") for n in range(count)]
    for _ in range(12):
        placed = await many.place(request(*out))
        assert placed.from_redis
        if count < 300:
            assert placed.prefill.worker_id not in out and placed.decode.worker_id not in out
    assert call_of(many, request(*out)) < 2 * 2 * MAX_SAMPLED + 10, "bounded, however many are excluded"


async def test_a_holder_of_the_prefix_is_found_among_many_whatever_is_excluded(many):
    chain = random.Random(3).randbytes(8 * 100)

    async def placed(*excluded: str) -> Placed:
        one = replace(request(*excluded), chain=chain, token_count=1700)
        found = await many.place(one)
        many.release(one.transfer_id)
        await many.settlement.settle()
        return found

    first = await placed()
    assert first.prefill is not None
    others = [f"prefill-{n}" for n in range(300) if f"prefill-{n}" != first.prefill.worker_id]
    for count in (0, 1, 60, 200):
        again = await placed(*others[:count])
        assert again.prefill == first.prefill and again.cached_prefill_tokens == 1600
    assert (await placed(first.prefill.worker_id)).prefill != first.prefill


@pytest.mark.parametrize("mode", ["fallback", "auto", "always"])
async def test_decode_workers_of_many_prefill_where_they_may(make, redis_url, namespace, mode):
    placement = await make(100, mode)
    with connect(redis_url) as client:
        register(client, namespace, placement._members.all)
        busy = {f"p:{one.name}": 5000 for one in placement._members.all[:-3]}
        parts = (
            (one.name, busy.get("p:" + one.name, 0), 0, pack(one), one.slot) for one in placement._members.all
        )
        client.eval(FILL, 0, f"{{{namespace}}}:", *(part for one in parts for part in one))
    placed = await placement.place(request())
    assert placed.from_redis
    assert (placed.prefill is None) == (mode != "fallback"), "three decode workers have nothing to prefill"
    if placed.prefill is None:
        assert placed.decode in placement._members.all[-3:]
    out = [f"prefill-{n}" for n in range(100)]
    placed = await placement.place(request(*out))
    assert placed.from_redis and placed.prefill is None, "every prefill worker is excluded"


async def test_a_fleet_that_grows_is_scored_anew(make, redis_url, namespace):
    """Placements of a small fleet do not move the sets."""
    placement = await make(65)
    few, last = placement._members.all[:64] + placement._members.all[65:-1], placement._members.all[64]
    with connect(redis_url) as client:
        register(client, namespace, few)
        placement._members.all = few
        assert call_of(placement, request()) > MAX_LISTED
        for _ in range(20):
            await placement.place(request())
        register(client, namespace, [last])
        load = {
            decoded(name): int(held) for name, held in client.hgetall(keys.load(namespace)).items() if name
        }
        assert sum(load.values()) == 20 * (100 + 110)
        for kind, field in (("p", "p:"), ("r", "d:")):
            (key,) = client.keys(f"{{{namespace}}}:set:*:{kind}")
            scores: Any = client.zrange(key, 0, -1, withscores=True)
            assert {decoded(name): score for name, score in scores if score} == {
                name[2:]: held for name, held in load.items() if name.startswith(field) and held
            }


async def test_while_some_workers_are_suspect_the_scores_of_a_large_fleet_follow_the_load(
    make, redis_url, namespace
):
    """The others are few enough to be named one by one; a moment later the sets are read again."""
    placement = await make(MAX_LISTED + 2)
    whole, late = placement._members.all, {f"{role}-{n}" for role in ("prefill", "decode") for n in (3, 4, 5)}
    with connect(redis_url) as client:
        register(client, namespace, whole)
        assert isinstance(placement.eligibility.for_script(request(), listed=False), Heads)
        placement._members.all = [
            replace(one, lease="suspect") if one.worker_id in late else one for one in whole
        ]
        named = placement.eligibility.for_script(request(), listed=False)
        assert isinstance(named, Candidates) and len(named.decode) == MAX_LISTED - 1
        assert placement.eligibility.for_script(request(), listed=False) is named, (
            "made once for all requests"
        )
        for _ in range(20):
            await placement.place(request())
        load = {decoded(name): int(held) for name, held in client.hgetall(keys.load(namespace)).items()}
        for kind, field in (("p", "p:"), ("r", "d:")):
            (key,) = client.keys(f"{{{namespace}}}:set:*:{kind}")
            scores: Any = client.zrange(key, 0, -1, withscores=True)
            assert {decoded(name): score for name, score in scores if score} == {
                name[2:]: held for name, held in load.items() if name.startswith(field) and held
            }


@pytest.mark.parametrize("old", ["prefill", "decode"])
async def test_workers_that_are_in_no_set_are_used_while_they_are_many(make, redis_url, namespace, old):
    """Of an earlier version: as soon as one is in the sets, the script would see no other."""
    placement = await make(70)
    late = [one for one in placement._members.all if one.role == old]
    new = [one for one in placement._members.all if one not in late]
    with connect(redis_url) as client:
        register(client, namespace, [*new, *late[:30]])
        calls = await placement.calls_in_redis()
        placed = [await placement.place(request()) for _ in range(100)]
        assert all(one.from_redis for one in placed)
        used = {getattr(one, old).worker_id for one in placed}
        assert len(used & {one.worker_id for one in late[30:]}) > 20
        assert await placement.calls_in_redis() - calls == 100, "a refused call is not counted"
        register(client, namespace, late[30:40])
        assert call_of(placement, request()) > 2 * MAX_SAMPLED
        placement._members.all = list(placement._members.all)  # read again
        assert (await placement.place(request())).from_redis
        assert call_of(placement, request()) < 12


def test_routers_and_scripts_agree_on_what_a_small_fleet_is():
    assert f"local SMALL = {MAX_LISTED}\n" in SETS


async def test_a_worker_without_a_lease_is_no_candidate_any_more(many, redis_url, namespace):
    """Found by the placement that would have taken it, not by all."""
    dead, *others = many._members.all  # prefill-0 is the best, as nothing waits there
    with connect(redis_url) as client:
        parts = ((one.name, 500, 500, pack(one), one.slot) for one in others)
        client.eval(FILL, 0, f"{{{namespace}}}:", *(part for one in parts for part in one))
        client.zadd(keys.leases(namespace), {dead.worker_id: client.time()[0] * 1000 - 60_000})
        before = client.get(keys.generation(namespace))
        placed = await many.place(request())
        assert placed.from_redis and placed.prefill != dead
        assert client.get(keys.generation(namespace)) != before, "routers read the membership again"
        sets = client.keys(f"{{{namespace}}}:set:*")
        assert not any(client.zscore(name, dead.name) is not None for name in sets)


@pytest.fixture
async def unread(many, redis_url, namespace):
    """The router's view lacks two workers of Redis's sets that are better than all others."""
    lacking = [many._members.all[0], many._members.all[300]]
    others = [one for one in many._members.all if one not in lacking]
    many._members.all = others
    with connect(redis_url) as client:
        parts = ((one.name, 5000, 5000, pack(one), one.slot) for one in others)
        client.eval(FILL, 0, f"{{{namespace}}}:", *(part for one in parts for part in one))
    return lacking


def load_of(client: Any, namespace: str, before: dict[str, int]) -> dict[str, int]:
    """What has been added since."""
    kept = {decoded(name): int(held) for name, held in client.hgetall(keys.load(namespace)).items() if name}
    return {name: more for name, held in kept.items() if (more := held - before.get(name, 0))}


async def test_workers_that_the_router_cannot_read_are_passed_over_after_one_try(
    many, unread, redis_url, namespace
):
    with connect(redis_url) as client:
        before = load_of(client, namespace, {})
    calls, requests = await many.calls_in_redis(), [request() for _ in range(20)]
    placed = [await many.place(one) for one in requests]
    assert all(one.from_redis for one in placed) and many.script.errors == 0
    assert 21 <= await many.calls_in_redis() - calls <= 22, "one more for each of the two"
    calls = await many.calls_in_redis()
    many._members.all = list(many._members.all)  # another view
    requests.append(request())
    assert (await many.place(requests[-1])).from_redis
    assert await many.calls_in_redis() - calls == 1
    with connect(redis_url) as client:
        load = load_of(client, namespace, before)
        assert sum(load.values()) == 21 * 210
        assert not any(name[2:] == one.name for name in load for one in unread)
        for one in requests:
            many.release(one.transfer_id)
        await many.settlement.settle()
        assert load_of(client, namespace, before) == {}
        many._members.all = [*many._members.all, unread[0]]
        many._members.all.sort(key=lambda one: one.slot)
        assert (await many.place(request())).prefill == unread[0], "it can be read now"


async def test_a_new_worker_of_another_model_of_the_checkpoint_gets_no_request(
    many, unread, redis_url, namespace, monkeypatch
):
    """It is in the sets before this router has read whose it is."""
    with connect(redis_url) as client:
        before = load_of(client, namespace, {})
    read = [*(replace(one, served_model="another") for one in unread), *many._members.all]

    async def refresh() -> None:
        many._members.all = read

    monkeypatch.setattr(many._members, "refresh", refresh)
    asked = [replace(request(), kv_group=kv_group_of(unread[0])) for _ in range(3)]
    placed = [await many.place(one) for one in asked]
    assert all(one.from_redis for one in placed) and many._members.all is read
    used = {worker.name for one in placed for worker in (one.prefill, one.decode)}
    assert used.isdisjoint(one.name for one in unread)
    with connect(redis_url) as client:
        load = load_of(client, namespace, before)
        assert sum(load.values()) == 3 * 210
        assert not any(name[2:] == one.name for name in load for one in unread)


async def test_the_charge_at_a_worker_that_cannot_be_read_is_taken_off_where_the_next_call_fails(
    many, unread, redis_url, namespace, monkeypatch
):
    script, asked = many.script._script, []
    with connect(redis_url) as client:
        before = load_of(client, namespace, {})

    async def once(*arguments: Any) -> Any:
        asked.append(arguments)
        if len(asked) > 1:
            raise TimeoutError
        return await script(*arguments)

    monkeypatch.setattr(many.script, "_script", once)
    one = request()
    assert not (await many.place(one)).from_redis
    await many.settlement.settle()
    with connect(redis_url) as client:
        load = load_of(client, namespace, before)
        assert sum(load.values()) == 210 and not any(name[2:] == w.name for name in load for w in unread)
        many.release(one.transfer_id)
        await many.settlement.settle()
        assert load_of(client, namespace, before) == {}
    monkeypatch.undo()


async def test_a_void_call_is_no_outage(make, monkeypatch, caplog):
    placement = await make(2)

    async def void(*_: Any) -> Any:
        return [-7]

    with monkeypatch.context() as patch:
        patch.setattr(placement.script, "_script", void)
        assert not (await placement.place(request())).from_redis
    assert placement.script.errors == 0 and placement.script.may_ask() and not caplog.records
    assert (await placement.place(request())).from_redis


async def test_a_worker_that_drains_and_is_still_in_the_sets_gets_nothing(many, redis_url, namespace):
    """Told to drain by an earlier version, which takes it out of no set."""
    drains, *others = many._members.all  # prefill-0 is the best, as nothing waits there
    with connect(redis_url) as client:
        parts = ((one.name, 500, 500, pack(one), one.slot) for one in others)
        client.eval(FILL, 0, f"{{{namespace}}}:", *(part for one in parts for part in one))
    many._members.all = [replace(drains, state="draining"), *others]
    placed = await many.place(request())
    assert placed.from_redis and placed.prefill is not None and placed.prefill.worker_id != "prefill-0"


async def test_where_every_lease_has_run_out_nothing_is_removed(many, redis_url, namespace):
    """The fault is taken to be Redis's: the router names candidates by its last view."""
    with connect(redis_url) as client:
        sets = client.keys(f"{{{namespace}}}:set:*")
        before = {name: client.zcard(name) for name in sets}
        client.zadd(keys.leases(namespace), {one.worker_id: 1 for one in many._members.all})
        placed = await many.place(request())
        assert placed.from_redis
        assert {name: client.zcard(name) for name in sets} == before


@pytest.mark.parametrize("seed", range(5))
def test_the_load_of_each_worker_follows_the_charges(seed):
    rng, charges, workers = random.Random(seed), Charges(), fleet(3).all
    ids = [bytes([n]) * 16 for n in range(8)]
    for _ in range(300):
        transfer_id = rng.choice(ids)
        match rng.randrange(4):
            case 0:
                charges.prefilled(transfer_id)
            case 1:
                charges.release(transfer_id)
            case _:
                one = replace(request(), transfer_id=transfer_id)
                charges.add(
                    one, rng.choice(workers), rng.choice(workers[3:]), rng.randrange(9), in_redis=True
                )
        wanted: Counter[str] = Counter()
        for charge in charges._charges.values():
            wanted[charge.prefill] += charge.prefill_tokens
            wanted[charge.decode] += charge.decode_tokens
        assert charges.by_worker == +wanted
    charges.clear()
    assert len(charges.by_worker) == 0
