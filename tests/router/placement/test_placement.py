"""Placement with real Redis: it keeps prefixes together, spreads load, corrects charges, and goes on without Redis."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import struct
import time
from types import SimpleNamespace

import pytest
import redis

from cluster.config.router import RouterConfig
from cluster.config.worker import Role
from cluster.errors import UnavailableError
from cluster.index.reporter import ChainReporter
from cluster.membership.reader import Members, read_workers
from cluster.membership.registration import Registration
from cluster.membership.types import WorkerInfo
from cluster.redis.embedded import EmbeddedRedis
from cluster.redis.memory import RedisMemory
from router.placement.placement import Placement
from router.placement.types import Placed, Reason
from tests.router.placement.place_requests import eventually, hashes, request


def worker(role: Role, index: int) -> WorkerInfo:
    epoch = secrets.randbits(64)
    return WorkerInfo(
        f"{role}-{index}", epoch, 0, role, "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000
    )


@pytest.fixture
async def fleet(redis_url, namespace):
    """Four prefill and four decode workers, registered."""
    registrations = [
        Registration(redis_url, namespace, worker(role, i))
        for role in ("prefill", "decode")
        for i in range(4)
    ]
    for registration in registrations:
        registration.start()
    await eventually(lambda: len(read_workers(redis_url, namespace)) == 8)
    yield registrations
    for registration in registrations:
        await asyncio.to_thread(registration.stop)


@pytest.fixture
async def router(redis_url, namespace, fleet):
    made = []

    async def start(**settings) -> Placement:
        config = RouterConfig(
            model="/m", redis_url=redis_url, namespace=namespace, **{"local_prefill": "never", **settings}
        )
        members = Members(redis_url, namespace)
        await members.start()
        placement = Placement(config, members, random.Random(1))
        await placement.start()
        made.append((placement, members))
        return placement

    yield start
    for placement, members in made:
        await placement.close()
        await members.close()


async def test_a_prefix_draws_its_requests_also_through_another_router(router):
    one, two = await router(), await router()
    prompt = list(range(1600))
    first = await one.place(request(prompt))
    again = await two.place(request(prompt + [7] * 20))
    assert again.prefill.worker_id == first.prefill.worker_id
    assert again.cached_prefill_tokens == 1600
    assert again.from_redis


async def test_a_burst_of_siblings_finds_its_prefix(router):
    placement = await router()
    shared = list(range(4000))
    hits = []
    for sibling in range(8):
        r = request([*shared, *[10_000 + sibling] * 16])
        hits.append((await placement.place(r)).cached_prefill_tokens > 0)
        placement.prefilled(r.transfer_id)
    assert sum(hits) >= 7


async def test_different_prompts_spread(router):
    placement = await router()
    chosen = [await placement.place(request([i * 1000 + j for j in range(800)])) for i in range(16)]
    assert {placed.prefill.worker_id for placed in chosen} == {f"prefill-{i}" for i in range(4)}
    assert len({placed.decode.worker_id for placed in chosen}) == 4


async def test_one_call_in_redis_per_placement(router):
    placement = await router()
    before = await placement.calls_in_redis()
    for i in range(5):
        await placement.place(request([i] * 100))
    assert await placement.calls_in_redis() - before == 5


async def test_the_terms_of_each_choice_are_kept(router):
    placement = await router()
    terms = [(await placement.place(request([i] * 400))).terms for i in range(3)]
    assert terms[0]["prefill"] > 0
    assert set(placement.script.cost_terms) == set(terms[0])
    for name, histogram in placement.script.cost_terms.items():
        assert histogram.count == 3
        assert histogram.sum == pytest.approx(sum(one[name] for one in terms))


async def test_charges_return_to_zero(router, redis_url, namespace):
    placement = await router()
    requests = [request([i] * 300) for i in range(6)]
    for one in requests:
        await placement.place(one)

    async def load() -> dict:
        return await placement._client.hgetall(f"{{{namespace}}}:load")

    assert any(int(v) for v in (await load()).values())
    for one in requests:
        placement.release(one.transfer_id)
    deadline = time.monotonic() + 5
    while any(int(v) for v in (await load()).values()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def load_is(placement: Placement, namespace: str, total: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        load = await placement._client.hgetall(f"{{{namespace}}}:load")
        if sum(int(tokens) for tokens in load.values()) == total:
            return
        assert time.monotonic() < deadline, load
        await asyncio.sleep(0.02)


@pytest.fixture
def settles_only_when_told(monkeypatch):
    """An idle router would heal its charges by itself, within some seconds."""
    monkeypatch.setattr("router.placement.settlement.ROUTER_LEASE_SECONDS", 60.0)


@pytest.mark.usefixtures("settles_only_when_told")
@pytest.mark.parametrize("turns", range(4))
async def test_the_charge_of_a_cancelled_request_is_returned(router, namespace, turns):
    """Cancelled before Redis has answered, while its answer is read, and when it has just been."""
    placement = await router()
    await placement.place(request([1] * 100))
    one = request([2] * 300)
    placing = asyncio.create_task(placement.place(one))
    await asyncio.sleep(0)
    if turns:
        time.sleep(0.05)  # noqa: ASYNC251  the answer is there when the loop looks next
    for _ in range(turns):
        await asyncio.sleep(0)
    placing.cancel()
    ends: list[Placed | BaseException] = await asyncio.gather(placing, return_exceptions=True)
    if isinstance(ends[0], Placed):
        placement.release(one.transfer_id)
    while await placement.calls_in_redis() < 2:  # it is carried out all the same
        await asyncio.sleep(0.01)
    await load_is(placement, namespace, 100 + 132)


@pytest.mark.usefixtures("settles_only_when_told")
async def test_a_settling_on_its_way_takes_nothing_off(router, namespace, monkeypatch):
    placement = await router()
    await placement.place(request([1] * 100))
    await placement.place(over := request([2] * 100))
    settle, begun, placed = placement.settlement._script, asyncio.Event(), asyncio.Event()

    async def slow(*arguments):
        begun.set()
        await placed.wait()
        return await settle(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(placement.settlement, "_script", slow)
        placement.release(over.transfer_id)
        await begun.wait()
        await placement.place(request([3] * 100))
        placed.set()
        await load_is(placement, namespace, 2 * (100 + 132))


async def test_reports_outlive_what_was_predicted(router, fleet, redis_url, namespace):
    placement = await router(index_feeds="reported")
    registration = fleet[2]
    reporter = ChainReporter(redis_url, namespace, "m", registration, list)
    reporter.start()
    prompt = list(range(500))
    reporter.report(hashes(prompt), 20)
    try:
        deadline = time.monotonic() + 5
        while (await placement.place(request(prompt))).cached_prefill_tokens != 320:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
    finally:
        await asyncio.to_thread(reporter.stop)


async def test_what_is_reported_does_not_count_where_only_predictions_do(router, fleet, redis_url, namespace):
    """The setting was without effect. A prediction then counts for as long as its entry lives."""
    placement, prompt = await router(index_feeds="predicted"), list(range(500))
    reporter = ChainReporter(redis_url, namespace, "m", fleet[2], list)
    reporter.start()
    reporter.report(hashes(prompt), 20)
    try:
        await eventually(lambda: not reporter.waiting)
        for cached in (0, 496):
            asked = request(prompt)
            assert (await placement.place(asked)).cached_prefill_tokens == cached
            placement.release(asked.transfer_id)
            await placement.settlement.settle()
    finally:
        await asyncio.to_thread(reporter.stop)
    with redis.Redis.from_url(redis_url) as client:
        (key,) = client.scan_iter(f"{{{namespace}}}:index:m:w:*")
        until_ms = [
            struct.unpack(">IIQ", held)[2] for slot, held in client.hgetall(key).items() if slot != b"c"
        ]
    assert max(until_ms) / 1000 > time.time() + 600


async def test_reports_do_not_count_while_redis_is_nearly_full_either(router, fleet, redis_url, namespace):
    """Only predictions were to, and none is made then: those that were made before do."""
    placement, reported, predicted = await router(index_feeds="predicted"), list(range(500)), [7] * 500

    async def cached(prompt: list[int]) -> int:
        asked = request(prompt)
        placed = await placement.place(asked)
        placement.release(asked.transfer_id)
        await placement.settlement.settle()
        return placed.cached_prefill_tokens

    reporter = ChainReporter(redis_url, namespace, "m", fleet[2], list)
    reporter.start()
    reporter.report(hashes(reported), 20)
    try:
        await eventually(lambda: not reporter.waiting)
        assert await cached(predicted) == 0
        placement.script._memory = SimpleNamespace(memory=RedisMemory(90, 100, "volatile-lru"))
        for _ in range(2):
            assert [await cached(predicted), await cached(reported)] == [496, 0]
    finally:
        await asyncio.to_thread(reporter.stop)


async def test_excluded_workers_are_avoided_while_others_live(router):
    placement = await router()
    bad = dict.fromkeys(("prefill-0", "prefill-1", "prefill-2", "decode-3"), Reason.LOST)
    for i in range(6):
        placed = await placement.place(request([i] * 64, excluded=bad))
        assert placed.prefill.worker_id == "prefill-3"
        assert placed.decode.worker_id != "decode-3"


async def test_one_life_of_a_worker_may_be_excluded(router):
    placement = await router()
    dispatchers = {worker.worker_id: worker.name for worker in placement._members.all}
    bad = dict.fromkeys([*(dispatchers[f"prefill-{n}"] for n in (0, 1)), "prefill-2@feed"], Reason.LOST)
    found = {(await placement.place(request([i] * 64, excluded=bad))).prefill.worker_id for i in range(12)}
    assert found == {"prefill-2", "prefill-3"}


async def test_a_role_without_workers_is_unavailable(redis_url, namespace):
    config = RouterConfig(model="/m", redis_url=redis_url, namespace=namespace)
    members = Members(redis_url, namespace)
    await members.start()
    placement = Placement(config, members)
    with pytest.raises(UnavailableError):
        await placement.place(request([1] * 20))
    await placement.close()
    await members.close()


async def test_redis_stopped_killed_and_back_empty_fails_no_request(tmp_path, namespace):
    server = EmbeddedRedis.start(tmp_path / "redis")
    registrations = [Registration(server.url, namespace, worker(role, 0)) for role in ("prefill", "decode")]
    for registration in registrations:
        registration.start()
    await eventually(lambda: len(read_workers(server.url, namespace)) == 2)
    config = RouterConfig(model="/m", redis_url=server.url, namespace=namespace, local_prefill="never")
    members = Members(server.url, namespace)
    await members.start()
    placement = Placement(config, members)
    await placement.start()
    assert (await placement.place(request([1] * 50))).from_redis

    os.kill(server.pid, signal.SIGSTOP)  # it hangs
    began = time.monotonic()
    assert not (await placement.place(request([2] * 50))).from_redis
    assert time.monotonic() - began < 1.0
    os.kill(server.pid, signal.SIGCONT)

    server.process.kill()
    server.process.wait(10)
    assert not (await placement.place(request([3] * 50))).from_redis
    server = EmbeddedRedis.start(tmp_path / "redis")  # empty
    deadline = time.monotonic() + 10
    while not (await placement.place(request([4] * 50))).from_redis or not members.redis_ok:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    await eventually(lambda: len(read_workers(server.url, namespace)) == 2)
    await placement.close()
    await members.close()
    for registration in registrations:
        await asyncio.to_thread(registration.stop)
    server.stop()


async def test_a_redis_that_lost_the_script_gets_it_again(router, redis_url):
    placement = await router()
    await placement.place(request([1] * 100))
    client = placement._client
    await client.script_flush()
    assert (await placement.place(request([2] * 100))).from_redis
    await client.client_kill_filter(_type="normal", skipme=True)
    assert (await placement.place(request([3] * 100))).from_redis
