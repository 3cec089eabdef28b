"""The registry keeps nothing of a worker that has been dead for long."""

from __future__ import annotations

from cluster.membership import keys, scripts
from cluster.membership.facts import group_id, pack
from cluster.membership.registry import encode
from cluster.membership.types import WorkerInfo
from cluster.protocol.times import FORGET_SECONDS
from cluster.redis.connect import connect

INFO = WorkerInfo("w", 7, 0, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)


def test_a_worker_dead_for_long_leaves_no_keys(redis_url, namespace):
    registry = keys.registry(namespace)
    with connect(redis_url) as client:
        named = "w", INFO.name, encode(INFO), "{}", "p"
        slot = client.eval(scripts.REGISTER, len(registry), *registry, *named, "", pack(INFO))
        assert client.exists(f"{{{namespace}}}:set:{group_id('m', 16, b'').decode()}:p")
        client.hset(keys.sequences(namespace), str(slot), 5)
        long_ago = client.time()[0] * 1000 - int(FORGET_SECONDS * 1000) - 1000
        client.zadd(keys.leases(namespace), {"w": long_ago})
        client.eval(scripts.READ, len(registry), *registry, int(FORGET_SECONDS * 1000))
        left = {key.decode() for key in client.scan_iter(f"{{{namespace}}}:*")}
        assert left == {keys.slots(namespace), keys.generation(namespace)}


def test_many_workers_dead_for_long_are_deleted_some_a_call(redis_url, namespace):
    registry = keys.registry(namespace)
    with connect(redis_url) as client:
        for n in range(100):
            client.hset(keys.members(namespace), f"w{n}", encode(INFO))
            client.zadd(keys.leases(namespace), {f"w{n}": 1})
        answers = [client.eval(scripts.READ, len(registry), *registry, 300_000) for _ in range(2)]
        assert [(len(one) - 2) // 5 for one in answers] == [36, 0], "the others are shown as dead until then"
        assert not client.exists(keys.members(namespace))


def test_a_lease_in_the_future_runs_out_from_now_on(redis_url, namespace):
    """After a failover to a Redis whose clock is behind; its worker has died meanwhile."""
    registry = keys.registry(namespace)
    with connect(redis_url) as client:
        client.set(keys.generation(namespace), "7")
        for script, more in ((scripts.READ, ()), (scripts.LOOK, ("7", 3000))):
            client.zadd(keys.leases(namespace), {"w": client.time()[0] * 1000 + 60_000, "past": 5})
            client.eval(script, len(registry), *registry, 1e15, *more)
            seconds, micros = client.time()
            assert client.zscore(keys.leases(namespace), "w") <= seconds * 1000 + micros // 1000
            assert client.zscore(keys.leases(namespace), "past") == 5


def test_a_lease_whose_registration_was_lost_goes_too(redis_url, namespace):
    """By an eviction policy that takes any key. Each look of a router would find it overdue, and read all workers."""
    registry = keys.registry(namespace)
    with connect(redis_url) as client:
        now = client.time()[0] * 1000
        client.zadd(keys.leases(namespace), {"lost": 1, "late": now - 10_000, "here": 1})
        client.hset(keys.members(namespace), "here", encode(INFO))
        for _ in range(2):
            client.eval(scripts.READ, len(registry), *registry, 300_000)
        assert client.zrange(keys.leases(namespace), 0, -1) == [b"late"]
