"""The verdict of `baton doctor --redis-url` on a Redis."""

from __future__ import annotations

import pytest
import redis

from baton.doctor.redis_check import check_redis, check_server
from cluster.redis.embedded import EmbeddedRedis
from tests.harness.fake_redis import FakeRedis, bulk, names_master, names_owner


@pytest.fixture
def server(tmp_path):
    made = EmbeddedRedis.start(tmp_path / "redis")
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("policy", "most", "grade", "says"),
    [
        ("volatile-lru", 1 << 30, "ok", ""),
        ("noeviction", 1 << 30, "warning", "volatile-lru: otherwise a full Redis takes no new entries"),
        ("allkeys-lru", 1 << 30, "warning", "volatile-lru: otherwise a full Redis evicts leases"),
        ("volatile-lru", 0, "warning", "maxmemory"),
        ("volatile-lru", 1, "warning", "raise maxmemory"),
    ],
)
def test_its_memory_and_policy(server, policy, most, grade, says):
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", most)
    check = check_redis(server.url)
    assert check.grade == grade
    assert policy in check.found and says in check.advice


def test_one_that_is_not_there():
    check = check_redis("redis://user:hush@127.0.0.1:1/0")
    assert check.grade == "missing" and "hush" not in check.found


INFO = {"redis_version": "7.2.4", "role": "master", "connected_slaves": 1, "cluster_enabled": 0}


@pytest.mark.parametrize(
    ("scheme", "facts", "grade", "says"),
    [
        ("redis", {}, "ok", ""),
        ("redis", {"redis_version": "6.2.0"}, "ok", ""),
        ("redis", {"redis_version": "10.0.1"}, "ok", ""),
        ("redis", {"redis_version": "6.0.16"}, "missing", "6.2 or later"),
        ("redis", {"role": "slave"}, "missing", "redis+sentinel://"),
        ("redis", {"cluster_enabled": 1}, "missing", "redis+cluster://"),
        ("redis+sentinel", {}, "ok", ""),
        ("redis+sentinel", {"connected_slaves": 0}, "warning", "no replica"),
        ("redis+sentinel", {"cluster_enabled": 1}, "missing", "redis+cluster://"),
        ("redis+cluster", {"cluster_enabled": 1, "connected_slaves": 0}, "ok", ""),
        ("redis+cluster", {"cluster_enabled": 1, "role": "slave"}, "missing", "takes no writes"),
    ],
)
def test_its_version_role_and_kind(scheme, facts, grade, says):
    def answer(command):
        if command[0].upper() == "INFO":
            lines = "".join(f"{name}:{value}\r\n" for name, value in {**INFO, **facts}.items())
            return bulk(f"# Server\r\n{lines}")
        if command[0].upper() == "SENTINEL":
            return names_master(fake.port)
        return names_owner(fake.port) if command[0].upper() == "CLUSTER" else b"+OK\r\n"

    fake = FakeRedis(answer)
    try:
        check = check_server(
            f"{scheme}://{fake.address}{'/m' if 'sentinel' in scheme else ''}?protocol=2", "ns"
        )
    finally:
        fake.close()
    assert (check.grade, says in check.advice) == (grade, True)
    assert facts.get("redis_version", "7.2.4") in check.found
    assert ("slot 9937, which has all keys {ns}:*" in check.found) == (scheme == "redis+cluster")


@pytest.mark.parametrize("scheme", ["redis", "redis+sentinel"])
def test_one_that_leaves_lines_out(scheme):
    """Behind a proxy, as routers and workers accept it."""
    fake = FakeRedis(
        lambda command: (
            bulk("# Server\r\n")
            if command[0].upper() == "INFO"
            else names_master(fake.port)
            if command[0].upper() == "SENTINEL"
            else b"+OK\r\n"
        )
    )
    try:
        check = check_server(
            f"{scheme}://{fake.address}{'/m' if 'sentinel' in scheme else ''}?protocol=2", "ns"
        )
    finally:
        fake.close()
    assert check.grade == "ok" and "unknown version" in check.found


def test_a_master_is_ok_and_a_silent_one_is_missing(server):
    check = check_server(server.url, "ns")
    assert check.grade == "ok" and "master with 0 replica(s)" in check.found
    silent = check_server("redis+sentinel://user:hush@127.0.0.1:1/m", "ns")
    assert silent.grade == "missing" and "hush" not in silent.found
