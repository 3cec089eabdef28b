"""Workers that are read again and again, by one that waits for them or for others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import redis

from cluster.membership import keys
from cluster.membership.reader import WHOLE_SECONDS
from cluster.membership.registry import Registry
from cluster.membership.repeated_reads import AllWorkers, NamedWorkers
from cluster.membership.status import WorkerStatus
from cluster.membership.types import WorkerInfo
from cluster.protocol.times import REGISTER_AGAIN_SECONDS

INFO = WorkerInfo("w", 7, 0, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as made:
        yield made


@pytest.fixture
def registry(redis_url: str, namespace: str) -> Iterator[Registry]:
    made = Registry(redis_url, namespace)
    yield made
    made.close()


def register(registry: Registry, worker_id: str) -> None:
    info = replace(INFO, worker_id=worker_id, process=f"process of {worker_id}")
    registry.register(info, WorkerStatus(), None)


def test_workers_that_redis_has_lost_may_come_again(
    redis_url: str, namespace: str, client: redis.Redis
) -> None:
    now = [100.0]
    named = NamedWorkers(redis_url, namespace, lambda: now[0])
    for lost in ("emptied", "away"):
        client.set(keys.slots(namespace), 7)
        named.read(["w"])
        assert not named.may_lack_some
        if lost == "emptied":
            client.delete(*keys.registry(namespace))
        else:
            away = mock.patch.object(named, "_script", side_effect=redis.ConnectionError("away"))
            with away, pytest.raises(redis.ConnectionError):
                named.read(["w"])
        assert named.read(["w"]) == [] and named.may_lack_some, lost
        now[0] += REGISTER_AGAIN_SECONDS + 0.1
        assert named.read(["w"]) == [] and not named.may_lack_some, lost
    named.close()


def test_workers_are_read_by_their_names(
    redis_url: str, namespace: str, client: redis.Redis, registry: Registry
) -> None:
    for n in range(3):
        register(registry, f"w{n}")
    registry.drain("w1", "stay")
    ahead = client.time()[0] * 1000 + 60_000
    client.zadd(keys.leases(namespace), {"w2": 1, "w0": ahead})
    named = NamedWorkers(redis_url, namespace)
    found = named.read(["w2", "w9", "w1"])
    assert [(one.worker_id, one.process, one.state, one.lease) for one in found] == [
        ("w1", "process of w1", "draining", "live"),
        ("w2", "process of w2", "ready", "dead"),
    ]
    assert named.read([]) == [] and not named.may_lack_some
    assert (client.zscore(keys.leases(namespace), "w0") or 0) < ahead - 30_000, "it runs out from now on"
    named.close()


def test_of_a_registry_that_stays_only_the_leases_are_read(
    redis_url: str, namespace: str, client: redis.Redis, registry: Registry
) -> None:
    now = [100.0]
    workers = AllWorkers(redis_url, namespace, lambda: now[0])
    assert workers.read() == []
    register(registry, "w0")
    assert [one.worker_id for one in workers.read()] == ["w0"]
    client.hset(keys.members(namespace), "unread", "{}")
    client.hdel(keys.members(namespace), "w0")
    client.zadd(keys.leases(namespace), {"w0": client.time()[0] * 1000 - 3000})
    assert [(one.worker_id, one.lease) for one in workers.read()] == [("w0", "suspect")]
    register(registry, "w1")
    assert [(one.worker_id, one.lease) for one in workers.read()] == [("w1", "live")]
    registry.drain("w1", "exit")
    assert [one.state for one in workers.read()] == ["draining"]
    client.hdel(keys.members(namespace), "w1")
    now[0] += WHOLE_SECONDS + 1
    assert workers.read() == [], "workers of earlier versions change no generation"
    workers.close()
