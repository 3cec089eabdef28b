"""Routers exchange their figures through a real Redis."""

from __future__ import annotations

import time

import redis

from cluster.membership import keys
from router.observe.live.exchange import Exchange
from router.observe.live.report import Counts, Requests, RouterReport


def report(requests: int) -> RouterReport:
    return RouterReport("ready", 1.0, 0, Counts(Requests(ok=requests)))


async def test_each_receives_the_others_messages_until_they_leave(redis_url: str, namespace: str) -> None:
    one, two = (Exchange(redis_url, namespace, name) for name in ("one", "two"))
    assert set(await one.swap(report(1))) == {"one"}
    heard = await two.swap(report(2))
    assert {name: told.report.counts.requests.ok for name, told in heard.items()} == {"one": 1, "two": 2}
    assert 0.0 <= heard["one"].age_seconds < 10.0
    await one.leave()
    assert set(await two.swap(report(3))) == {"two"}
    await two.leave()


async def test_junk_and_the_long_silent_are_left_out(redis_url: str, namespace: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        now = int(time.time() * 1000)
        told = {"junk": "x", "other version": f"{now} {{}}", "long gone": f"{now - 3_600_000} {{}}"}
        client.hset(keys.router_reports(namespace), mapping=told)
        own = Exchange(redis_url, namespace, "own")
        assert set(await own.swap(report(1))) == {"own"}
        assert set(client.hkeys(keys.router_reports(namespace))) == {b"other version", b"own"}
        await own.leave()


async def test_without_redis_a_router_lists_itself() -> None:
    alone = Exchange("unix:///nowhere/redis.sock", "test", "alone")
    for requests in (1, 2):
        heard = await alone.swap(report(requests))
        assert {name: told.report.counts.requests.ok for name, told in heard.items()} == {"alone": requests}
    await alone.leave()
