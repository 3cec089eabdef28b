"""Finders of servers, and seeds that answer as a test says."""

from __future__ import annotations

import time

from cluster.redis.finder import Finder
from cluster.redis.urls import seeds_of
from tests.harness.fake_redis import Answer, FakeRedis

OK = b"+OK\r\n"


def says(answer: bytes, after: float = 0.0) -> Answer:
    def say(command: list[str]) -> bytes:
        if command[0].upper() in ("SENTINEL", "CLUSTER"):
            time.sleep(after)
            return answer
        return OK

    return say


def finder_of(*seeds: FakeRedis, kind: str = "sentinel", more: str = "") -> Finder:
    hosts = ",".join(one.address for one in seeds)
    name = "/m?" if kind == "sentinel" else "?hash_tag=ns&"
    seeds_found = seeds_of(f"redis+{kind}://{hosts}{name}protocol=2{more}")
    assert seeds_found is not None
    return Finder(seeds_found)
