"""A real Redis with little memory, filled by the index: all other keys stay, and all other calls work."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry

from baton.autoscaler.leader import Leadership
from cluster.config.router import RouterConfig
from cluster.index import scripts
from cluster.index.reporter import ChainReporter
from cluster.membership import keys
from cluster.membership.reader import Members, read_workers
from cluster.membership.registration import Registration
from cluster.membership.types import WorkerInfo
from cluster.protocol.block_hash import index_keys
from cluster.redis.embedded import EmbeddedRedis
from cluster.redis.memory import RedisMemory, says_full
from cluster.security.keys import RateLimits
from router.placement.memory_watch import MemoryWatch
from router.placement.placement import Placement
from router.placement.types import PlacementRequest
from router.quota.quota import ChargedRequest, Quota, Use
from tests.harness.waiting import until, wait_for

MEBIBYTE = 1 << 20
RNG = random.Random(0)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis.start(tmp_path / "redis")
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 8 * MEBIBYTE)
    yield server
    server.stop()


@pytest.fixture
def client(small: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(small.url) as made:
        yield made


def worker(role: str, number: int) -> WorkerInfo:
    return WorkerInfo(f"{role}-{number}", 7, 0, role, "m", "h:1", "", b"", "", "host", 4096, 10_000)  # type: ignore[arg-type]


def fill(client: redis.Redis, namespace: str, slot: int, name: str, chains: int) -> None:
    """Report chains without a common prefix, as a worker does."""
    report = client.register_script(scripts.report())
    registered = [keys.slot_owners(namespace), keys.sequences(namespace)]
    first = int(client.hget(registered[1], str(slot)) or 1)  # type: ignore[arg-type]
    for number in range(first, first + chains // 50):
        some = [part for _ in range(50) for part in (64, RNG.randbytes(64 * 8))]
        head: list[Any] = [scripts.prefix(namespace, "m"), slot, name, number, 3_600_000]
        assert report(keys=registered, args=[*head, *some]) == b"ok"


@pytest.fixture
async def cluster(
    small: EmbeddedRedis, namespace: str
) -> AsyncIterator[tuple[Placement, Quota, list[Registration]]]:
    registrations = [Registration(small.url, namespace, worker(role, 0)) for role in ("prefill", "decode")]
    for registration in registrations:
        registration.start()
    await until(lambda: len(read_workers(small.url, namespace)) == 2, "registered")
    members = Members(small.url, namespace)
    await members.start()
    config = RouterConfig(model="/m", redis_url=small.url, namespace=namespace, local_prefill="never")
    placement = Placement(config, members, random.Random(1))
    await placement.start()
    quota = Quota(small.url, namespace, CollectorRegistry())
    yield placement, quota, registrations
    await quota.close()
    await placement.close()
    await members.close()
    for registration in registrations:
        await asyncio.to_thread(registration.stop)


def others(client: redis.Redis, namespace: str) -> set[bytes]:
    """All keys that do not belong to the index."""
    return {
        key for key in client.scan_iter(f"{{{namespace}}}:*") if b":m:n:" not in key and b":m:w:" not in key
    }


async def test_a_full_index_stops_nothing(small, client, namespace, cluster, monkeypatch) -> None:
    for module in ("settlement", "place_script"):
        monkeypatch.setattr(f"router.placement.{module}.SCRIPT_SECONDS", 10.0)
    monkeypatch.setattr("router.quota.scripts.CALL_SECONDS", 10.0)
    placement, quota, registrations = cluster
    limits = RateLimits(requests_per_minute=1000, tokens_per_minute=10_000_000)
    first = await quota.charge("t", limits, 500, ChargedRequest("first"))
    held = PlacementRequest(b"held", b"", 300, 10)
    await placement.place(held)
    before = others(client, namespace)
    for round_ in range(6):
        await asyncio.to_thread(fill, client, namespace, registrations[0].slot, registrations[0].name, 3000)
        request = PlacementRequest(bytes([round_]) * 16, RNG.randbytes(8 * 16), 256, 10)
        placed = await placement.place(request)
        assert placed.from_redis and not placement.script.errors
        charge = await quota.charge("t", limits, 10, ChargedRequest(str(round_)))
        assert charge is not None and charge.certain and not quota.scripts.errors
        await quota.settle(charge, Use(5, 5))
        placement.release(request.transfer_id)
    assert client.info("stats")["evicted_keys"] > 1000, "it was full"
    assert before <= others(client, namespace) | {f"{{{namespace}}}:quota-request:first".encode()}
    newcomer = Registration(small.url, namespace, worker("decode", 1))
    newcomer.start()
    await until(lambda: newcomer.slot > 0, "a worker registers")
    registered = {one.worker_id for one in await asyncio.to_thread(read_workers, small.url, namespace)}
    assert registered == {"prefill-0", "decode-0", "decode-1"}
    renewed = client.zrange(keys.leases(namespace), 0, -1, withscores=True)

    def all_renewed() -> bool:
        return all(client.zscore(keys.leases(namespace), name) > at for name, at in renewed)

    await until(all_renewed, "they renew")
    assert not any(one.errors for one in (*registrations, newcomer))
    await until(
        lambda: int(client.hget(f"{{{namespace}}}:load", b"d:" + _decode(placement)) or 0) == 310, "settled"
    )
    assert first is not None
    await quota.settle(first, Use(200, 100))
    assert quota.unsettled == 0 and not quota.scripts.errors
    await asyncio.to_thread(newcomer.stop)


def _decode(placement: Placement) -> bytes:
    (charge,) = placement.charges._charges.values()
    return charge.decode.encode()


async def test_only_the_index_has_a_time_to_live(small, client, namespace, cluster) -> None:
    placement, quota, registrations = cluster
    limits = RateLimits(requests_per_minute=1000, tokens_per_minute=10_000)
    for number in range(3):
        charge = await quota.charge("t", limits, 10, ChargedRequest(str(number)))
        assert charge is not None
        if number:
            await quota.settle(charge, Use(5, 5, finished=number == 1))
        await placement.place(PlacementRequest(bytes([number]) * 16, RNG.randbytes(8 * 16), 256, 10))
    await asyncio.to_thread(fill, client, namespace, registrations[0].slot, registrations[0].name, 50)
    kept, index = others(client, namespace), set(client.scan_iter(f"{{{namespace}}}:index:m:*"))
    assert len(kept) > 10 and len(index) > 100
    assert [key for key in kept if client.pttl(key) != -1] == [], "Redis would evict them"
    assert [key for key in index if client.pttl(key) == -1] == [], "Redis cannot evict them"


async def test_a_router_asks_less_of_a_redis_that_is_nearly_full(small, client, namespace, cluster) -> None:
    placement, _, _ = cluster
    chain = RNG.randbytes(8 * 16)
    client.config_set("maxmemory", 1 << 40)
    await placement.poll.read()
    await placement.place(PlacementRequest(b"a" * 16, chain, 256, 10))
    again = await placement.place(PlacementRequest(b"b" * 16, chain, 256, 10))
    assert again.cached_prefill_tokens > 0, "predicted"
    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory", int(used / 0.8))
    await placement.poll.read()
    assert placement.watch.memory.pressed and placement.watch.memory.share < 0.9
    assert placement.watch.memory.shortened(3600) < 3600
    other = RNG.randbytes(8 * 16)
    for name in (b"c", b"d"):
        placed = await placement.place(PlacementRequest(name * 16, other, 256, 10))
        assert placed.from_redis and placed.cached_prefill_tokens == 0, "no longer"
    assert not client.exists(f"{{{namespace}}}:index:m:n:".encode() + other[:8])


def test_pressure_and_shorter_times_follow_the_share_that_is_used() -> None:
    half, most = RedisMemory(50, 100, "volatile-lru"), RedisMemory(100, 100, "noeviction")
    assert not half.pressed and half.shortened(600) == 600 and half.evicts_index_only
    assert most.pressed and most.shortened(600) == 10 and not most.evicts_index_only
    assert RedisMemory(85, 100, "allkeys-lru").shortened(600) == pytest.approx(300)
    assert not RedisMemory(85, 100, "allkeys-lru").evicts_index_only
    assert not RedisMemory().evicts_index_only
    assert RedisMemory(70, 100).pressed and not RedisMemory(10**12, 0, "noeviction").pressed


def test_a_redis_with_room_again_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """It said that 10 % are used, and to raise maxmemory."""
    caplog.set_level("INFO", "router.placement.memory_watch")
    watch = MemoryWatch("any")
    for used in (10, 80, 90, 10, 10):
        watch._take([0, {"used_memory": used, "maxmemory": 100, "maxmemory_policy": "volatile-lru"}])
    full, room = caplog.records
    assert full.levelname == "WARNING" and full.getMessage().startswith("Redis's memory is 80 % used; above")
    assert room.levelname == "INFO" and "10 % used: placements are predicted again" in room.getMessage()


async def test_a_policy_that_evicts_nothing_is_warned_of_once(
    small, client, namespace, cluster, caplog
) -> None:
    placement, _, _ = cluster
    await placement.poll.read()
    assert placement.watch.memory.evicts_index_only and not caplog.records
    client.config_set("maxmemory-policy", "noeviction")
    for _ in range(3):
        await placement.poll.read()
    assert not placement.watch.memory.evicts_index_only
    assert [
        one.message for one in caplog.records if "noeviction" in one.message and "volatile-lru" in one.message
    ]
    assert sum("noeviction" in one.message for one in caplog.records) == 1


async def test_a_redis_that_hides_its_memory_is_warned_of_once(small, client, namespace, caplog) -> None:
    client.execute_command("ACL", "SETUSER", "blind", "on", ">word", "~*", "+@all", "-info")
    config = RouterConfig(
        model="/m", redis_url=small.url.replace("unix://", "unix://blind:word@"), namespace=namespace
    )
    members = Members(config.redis_url, namespace)
    placement = Placement(config, members)
    for _ in range(3):
        await placement.poll.read()
    assert not placement.watch.memory.evicts_index_only, "unknown is not well"
    assert sum("+info" in one.message for one in caplog.records) == 1
    await placement.close()
    await members.close()
    registration = Registration(config.redis_url, namespace, worker("prefill", 0))
    registration.register_again()
    reporter = ChainReporter(config.redis_url, namespace, "m", registration, list)
    assert reporter._look_at_memory() == RedisMemory(), "its reports go on"
    reporter.stop()
    registration.stop()


def test_reports_set_a_shorter_time_to_live(small, client, namespace) -> None:
    registration = Registration(small.url, namespace, worker("prefill", 0))
    registration.register_again()
    reporter = ChainReporter(small.url, namespace, "m", registration, list)
    try:
        chain = [RNG.randbytes(32) for _ in range(8)]
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] / 0.9))
        reporter._resync_if_new_slot()
        reporter.report(chain, 8)
        reporter._send_batch()
        (key,) = client.scan_iter(f"{{{namespace}}}:index:m:n:*")
        assert 0 < client.pttl(key) < 0.6 * scripts.NODE_TTL_SECONDS * 1000
        assert key.endswith(index_keys(chain)[:8])
    finally:
        reporter.stop()
        registration.stop()


# --- no eviction: what filled it stays -----------------------------------------------------------------------


@pytest.fixture
def full(small: EmbeddedRedis, client: redis.Redis) -> Callable[[], None]:
    """Call it to make the server's limit smaller than what it holds."""
    client.config_set("maxmemory-policy", "noeviction")

    def fill_it() -> None:
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("one-more", b"")

    return fill_it


async def test_a_full_redis_that_evicts_nothing_serves(
    small, client, namespace, cluster, full, monkeypatch
) -> None:
    for module in ("settlement", "place_script"):
        monkeypatch.setattr(f"router.placement.{module}.SCRIPT_SECONDS", 10.0)
    monkeypatch.setattr("router.quota.scripts.CALL_SECONDS", 10.0)
    placement, quota, registrations = cluster
    await asyncio.to_thread(full)
    limits = RateLimits(requests_per_minute=1000, tokens_per_minute=10_000_000)
    before = dict(client.zrange(keys.leases(namespace), 0, -1, withscores=True))
    for number in range(30):
        request = PlacementRequest(bytes([number]) * 16, RNG.randbytes(8 * 16), 256, 10)
        assert (await placement.place(request)).from_redis
        charge = await quota.charge("t", limits, 10, ChargedRequest(str(number)))
        assert charge is not None and charge.certain
        await quota.settle(charge, Use(5, 5))
        if number % 2:
            placement.release(request.transfer_id)
    assert not placement.script.errors and not quota.scripts.errors and not quota.unsettled
    newcomer = Registration(small.url, namespace, worker("decode", 1))
    newcomer.start()
    await until(lambda: newcomer.slot > 0, "a worker registers")

    def all_renewed() -> bool:
        now = dict(client.zrange(keys.leases(namespace), 0, -1, withscores=True))
        return all(now[name] > at for name, at in before.items())

    await until(all_renewed, "leases are renewed")
    await asyncio.to_thread(newcomer.set_draining, "exit")
    states = {one.worker_id: one.state for one in await asyncio.to_thread(read_workers, small.url, namespace)}
    assert states == {"prefill-0": "ready", "decode-0": "ready", "decode-1": "draining"}
    assert not any(one.errors for one in (*registrations, newcomer))
    assert not placement.settlement.errors
    await asyncio.to_thread(newcomer.stop)


def test_the_index_is_not_written_until_there_is_room(small, client, namespace, full, monkeypatch) -> None:
    monkeypatch.setattr("cluster.index.reporter.FULL_SECONDS", 0.01)
    registration = Registration(small.url, namespace, worker("prefill", 0))
    registration.register_again()
    reporter = ChainReporter(small.url, namespace, "m", registration, list)
    full()
    before = client.info("memory")["used_memory"]
    reporter.start()
    try:
        for _ in range(2000):
            reporter.report([RNG.randbytes(32) for _ in range(64)], 64)
        wait_for(lambda: reporter.waiting == 2000, 20, "reports wait")
        for _ in range(3):
            with pytest.raises(redis.ResponseError) as caught:
                reporter._send(list(reporter._waiting.values())[:64])
            assert says_full(caught.value)
        assert not list(client.scan_iter(f"{{{namespace}}}:index:*"))
        assert client.info("memory")["used_memory"] < before + MEBIBYTE
        assert registration.errors == 0
        client.config_set("maxmemory", 64 * MEBIBYTE)
        wait_for(lambda: reporter.waiting == 0, 20, "they are sent once there is room")
        assert len(list(client.scan_iter(f"{{{namespace}}}:index:m:n:*"))) > 1000
    finally:
        reporter.stop()
        registration.stop()


def test_an_autoscaler_keeps_its_lease_at_a_full_redis(small, client, namespace, full) -> None:
    full()
    leader, other = (Leadership(small.url, namespace, 60.0) for _ in range(2))
    assert [leader.hold(), other.hold(), leader.hold()] == [True, False, True]
    leader.close()
    assert other.hold()
    other.close()


def test_what_a_full_redis_says() -> None:
    told = "command not allowed when used memory > 'maxmemory'."
    for text in (told, f"OOM {told}", f"ERR Error running script (call to f_1): @user_script:1: -OOM {told}"):
        assert says_full(redis.ResponseError(text))
    for text in ("ERR no OOM here", "READONLY x", "WRONGTYPE Operation"):
        assert not says_full(redis.ResponseError(text))
