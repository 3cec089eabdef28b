"""Quotas in real Redis, charged by two routers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time

import pytest
from prometheus_client import CollectorRegistry

from cluster.auth.keys import NO_LIMITS, RateLimits
from cluster.errors import OverloadedError
from cluster.redis.embedded import EmbeddedRedis
from router.quota.quota import RETRY_SECONDS, Charge, Quota


@pytest.fixture
async def routers(redis_url, namespace):
    made = [Quota(redis_url, namespace, CollectorRegistry()) for _ in range(2)]
    yield made
    for one in made:
        await one.close()


async def admitted(quotas: list[Quota], limits: RateLimits, count: int, tokens: int) -> list[Charge]:
    """Of `count` requests at once, through one router and the other by turns."""

    async def ask(number: int) -> Charge | None:
        # A busy machine may make Redis seem slow; then nothing was checked, and the request asks again.
        for _ in range(20):
            try:
                charge = await quotas[number % len(quotas)].charge("t", limits, tokens)
            except OverloadedError:
                return None
            if charge is not None:
                return charge
            await asyncio.sleep(RETRY_SECONDS)
        raise AssertionError("Redis did not answer")

    found = await asyncio.gather(*(ask(number) for number in range(count)))
    return [one for one in found if one is not None]


def unchecked(quota: Quota) -> float:
    return float(quota.unchecked._value.get())


async def test_requests_are_counted_over_all_routers(routers):
    limits = RateLimits(requests_per_minute=10)
    assert len(await admitted(routers, limits, 40, 5)) == 10
    with pytest.raises(OverloadedError) as caught:
        await routers[1].charge("t", limits, 5)
    assert (caught.value.field, caught.value.limit) == ("requests_per_minute", "10")
    assert 3 < caught.value.retry_after_seconds <= 6, "one place in six seconds"
    assert await routers[0].charge("another", limits, 5) is not None


async def test_tokens_are_charged_by_estimate_and_settled_by_use(routers):
    one, two = routers
    limits = RateLimits(tokens_per_minute=1000)
    (first,) = await admitted([one], limits, 1, 900)
    with pytest.raises(OverloadedError) as caught:
        await two.charge("t", limits, 900)
    assert caught.value.field == "tokens_per_minute"
    assert 40 < caught.value.retry_after_seconds <= 48
    await one.settle(first, 100, served=True)
    (second,) = await admitted([two], limits, 1, 800)
    await two.settle(second, 1800, served=True)  # it went on for longer than anybody expected
    with pytest.raises(OverloadedError) as caught:
        await one.charge("t", limits, 1)
    assert 45 < caught.value.retry_after_seconds <= 60


async def test_who_was_not_served_pays_nothing(routers):
    limits = RateLimits(requests_per_minute=1, tokens_per_minute=100)
    for _ in range(3):
        (charge,) = await admitted(routers[:1], limits, 1, 100)
        await routers[1].settle(charge, 0, served=False)


async def test_what_is_larger_than_a_bucket_enters_an_empty_one(routers):
    limits = RateLimits(tokens_per_minute=1000)
    assert len(await admitted(routers, limits, 1, 3000)) == 1
    with pytest.raises(OverloadedError) as caught:
        await routers[0].charge("t", limits, 1)
    assert 110 < caught.value.retry_after_seconds <= 121, "and is paid for afterwards"


async def test_room_comes_back_with_time(routers):
    limits = RateLimits(tokens_per_minute=60_000)
    await admitted(routers, limits, 1, 60_000)
    began = time.monotonic()
    with pytest.raises(OverloadedError) as caught:
        await routers[0].charge("t", limits, 500)
    assert caught.value.retry_after_seconds <= 0.5
    while not await admitted(routers, limits, 1, 500):
        assert time.monotonic() - began < 10
        await asyncio.sleep(0.05)


async def test_an_idle_bucket_is_forgotten(routers, redis_url, namespace):
    import redis

    await admitted(routers, RateLimits(requests_per_minute=600, tokens_per_minute=6000), 1, 10)
    client = redis.Redis.from_url(redis_url)
    assert 0 < client.pttl(f"{{{namespace}}}:quota:t") <= 1200
    client.close()


async def test_without_limits_nobody_is_asked(namespace):
    quota = Quota("redis://127.0.0.1:1", namespace, CollectorRegistry())
    assert await quota.charge("t", NO_LIMITS, 5) is None
    assert unchecked(quota) == 0
    await quota.close()


async def test_everybody_is_let_in_while_redis_is_gone(tmp_path, namespace, caplog):
    server = EmbeddedRedis.start(tmp_path / "redis")
    quota = Quota(server.url, namespace, CollectorRegistry())
    limits = RateLimits(requests_per_minute=1)
    with caplog.at_level(logging.INFO, logger="router.quota.quota"):
        await admitted([quota], limits, 1, 1)
        before = unchecked(quota)
        os.kill(server.pid, signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(5):
            assert await quota.charge("t", limits, 1) is None
        assert time.monotonic() - began < 2.0
        os.kill(server.pid, signal.SIGCONT)
        server.process.kill()
        server.process.wait(10)
        await asyncio.sleep(RETRY_SECONDS)
        assert await quota.charge("t", limits, 1) is None
        assert unchecked(quota) - before == 6
        server = EmbeddedRedis.start(tmp_path / "redis")
        assert len(await admitted([quota], limits, 1, 1)) == 1
        assert not await admitted([quota], limits, 1, 1), "and counts again"
    said = [record.message for record in caplog.records if "not checked" in record.message]
    assert len(said) == len([r for r in caplog.records if "checked again" in r.message]), "once each time"
    await quota.close()
    server.stop()
