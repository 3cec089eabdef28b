"""The verdict of `baton doctor --redis-url` on a Redis."""

from __future__ import annotations

import pytest
import redis

from baton.doctor.redis_check import check_redis
from cluster.redis.embedded import EmbeddedRedis


@pytest.fixture
def server(tmp_path):
    made = EmbeddedRedis.start(tmp_path / "redis")
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("policy", "most", "grade", "says"),
    [
        ("volatile-lru", 1 << 30, "ok", ""),
        ("noeviction", 1 << 30, "warning", "volatile-lru"),
        ("allkeys-lru", 1 << 30, "warning", "volatile-lru"),
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
