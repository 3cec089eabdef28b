"""Quotas in real Redis, charged by two routers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time

import pytest
from prometheus_client import CollectorRegistry

from cluster.errors import OverloadedError
from cluster.redis.embedded import EmbeddedRedis
from cluster.security.keys import NO_LIMITS, RateLimits
from router.quota.quota import Quota, Use
from router.quota.scripts import RETRY_SECONDS
from tests.router.quota.charging import admitted


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


async def test_a_tenants_requests_for_one_model_are_counted_apart(routers):
    one, two = routers
    limits = RateLimits(requests_per_minute=1)
    charge = await one.charge("t", limits, 5, model="a")
    with pytest.raises(OverloadedError, match="requests per minute for model 'a' are used up: 1"):
        await two.charge("t", limits, 5, model="a")
    with pytest.raises(OverloadedError, match="for model 'a'"):
        two.check("t", limits, "a")
    two.check("t", limits)
    for others in ("b", ""):
        assert await two.charge("t", limits, 5, model=others) is not None
    await one.settle(charge, None)
    assert await one.charge("t", limits, 5, model="a") is not None


async def test_tokens_are_charged_by_estimate_and_settled_by_use(routers):
    one, two = routers
    limits = RateLimits(tokens_per_minute=1000)
    (first,) = await admitted([one], limits, 1, 900)
    with pytest.raises(OverloadedError) as caught:
        await two.charge("t", limits, 900)
    assert caught.value.field == "tokens_per_minute"
    assert 40 < caught.value.retry_after_seconds <= 48
    await one.settle(first, Use(60, 40))
    (second,) = await admitted([two], limits, 1, 800)
    await two.settle(second, Use(800, 1000))  # it went on for longer than expected
    with pytest.raises(OverloadedError) as caught:
        await one.charge("t", limits, 1)
    assert 45 < caught.value.retry_after_seconds <= 60


async def test_a_tenant_whose_requests_are_used_up_is_refused_until_there_may_be_one(routers, monkeypatch):
    one, _ = routers
    limits = RateLimits(requests_per_minute=1)
    one.check("t", limits)
    (charge,) = await admitted([one], limits, 1, 5)
    one.check("t", limits)  # it may have one more: only Redis can tell
    assert not await admitted([one], limits, 1, 5)
    with pytest.raises(OverloadedError) as caught:
        one.check("t", limits)
    assert (caught.value.field, caught.value.limit) == ("requests_per_minute", "1")
    assert 50 < caught.value.retry_after_seconds <= 60
    one.check("another", limits)
    one.check("t", RateLimits(requests_per_minute=2))  # its key has changed
    await one.settle(charge, None)
    one.check("t", limits)
    await admitted([one], limits, 2, 5)
    later = time.monotonic() + 60
    monkeypatch.setattr("router.quota.quota.time.monotonic", lambda: later)
    one.check("t", limits)


async def test_a_tenant_whose_tokens_are_used_up_may_have_a_shorter_request(routers):
    limits = RateLimits(requests_per_minute=9, tokens_per_minute=100)
    assert len(await admitted(routers[:1], limits, 2, 90)) == 1
    routers[0].check("t", limits)


async def test_a_charge_without_tokens_neither_clears_the_used_ones_nor_is_refused_for_them(routers):
    limits = RateLimits(requests_per_minute=10, tokens_per_minute=1000)
    (first,) = await admitted(routers, limits, 1, 1000)
    await routers[0].settle(first, Use(500, 1500))
    (free,) = await admitted(routers, limits, 1, 0)
    await routers[0].settle(free, Use(0, 0))
    with pytest.raises(OverloadedError) as caught:
        await routers[1].charge("t", limits, 1)
    assert caught.value.field == "tokens_per_minute"
    assert 45 < caught.value.retry_after_seconds <= 61


@pytest.mark.parametrize(
    ("own", "other", "tokens"),
    [
        (RateLimits(tokens_per_minute=1000), RateLimits(requests_per_minute=50), 900),
        (RateLimits(requests_per_minute=1), RateLimits(tokens_per_minute=1_000_000), 900),
    ],
    ids=["tokens", "requests"],
)
async def test_a_key_without_a_limit_leaves_what_other_keys_of_its_tenant_have_used(
    routers, own, other, tokens
):
    """It cleared them: every request under it gave the tenant's other keys a whole minute's worth."""
    (charge,) = await admitted(routers, own, 1, tokens)
    for _ in range(3):
        for served in (Use(500, 5000), None):
            (beside,) = await admitted(routers, other, 1, 900)
            await routers[1].settle(beside, served)
        assert not await admitted(routers, own, 1, tokens)
    await routers[0].settle(charge, None)
    assert await admitted(routers, own, 1, tokens), "nor is what they have used made more"


async def test_each_limit_of_a_tenant_leaks_since_its_own_last_request(routers, redis_url, namespace):
    """They had one time: a request that counted in one bucket took the time away that the other had to leak."""
    import redis

    both = RateLimits(requests_per_minute=60_000, tokens_per_minute=60_000)
    await admitted(routers, both, 1, 60_000)
    began = time.monotonic()
    while not await admitted(routers, RateLimits(tokens_per_minute=60_000), 1, 200):
        await admitted(routers, RateLimits(requests_per_minute=60_000), 1, 1)
        assert time.monotonic() - began < 10
        await asyncio.sleep(0.02)
    with redis.Redis.from_url(redis_url) as client:
        ends = client.zscore(f"{{{namespace}}}:quota-expiry", f"{{{namespace}}}:quota:t")
        assert ends is not None and ends / 1000 - client.time()[0] > 55, (
            "kept for the bucket that needs longest"
        )


@pytest.mark.parametrize("limit", ["requests_per_minute", "tokens_per_minute"])
async def test_a_key_with_a_lower_limit_waits_until_what_others_used_is_forgotten(routers, limit):
    """It was told to come back after 46 minutes, and its router did not ask before; a minute is enough."""
    large, small = RateLimits(**{limit: 1000}), RateLimits(**{limit: 20})
    tokens = 20 if limit == "requests_per_minute" else 1000
    assert await admitted(routers, large, 950 if limit == "requests_per_minute" else 1, tokens)
    with pytest.raises(OverloadedError) as caught:
        await routers[0].charge("t", small, 20)
    assert 40 < caught.value.retry_after_seconds <= 62
    if limit == "requests_per_minute":
        with pytest.raises(OverloadedError) as caught:
            routers[0].check("t", small)
        assert caught.value.retry_after_seconds <= 62


async def test_what_is_used_leaks_also_when_redis_has_a_clock_that_is_behind(routers, redis_url, namespace):
    """A replica took over, for example."""
    import redis

    limits, bucket = RateLimits(tokens_per_minute=60_000), f"{{{namespace}}}:quota:t"
    await admitted(routers, limits, 1, 60_000)
    with redis.Redis.from_url(redis_url) as client:
        client.hset(bucket, "tokens_at", int(time.time() * 1000) + 3_600_000)
    began = time.monotonic()
    while not await admitted(routers, limits, 1, 200):
        assert time.monotonic() - began < 10
        await asyncio.sleep(0.02)


async def test_a_request_that_was_not_served_is_not_charged(routers):
    limits = RateLimits(requests_per_minute=1, tokens_per_minute=100)
    for _ in range(3):
        (charge,) = await admitted(routers[:1], limits, 1, 100)
        await routers[1].settle(charge, None)


async def test_a_request_larger_than_a_bucket_enters_an_empty_one(routers):
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
    bucket, expiry = f"{{{namespace}}}:quota:t", f"{{{namespace}}}:quota-expiry"
    seconds, micros = client.time()
    expires = client.zscore(expiry, bucket)
    assert expires is not None
    assert 0 < expires - (seconds * 1000 + micros / 1000) <= 1200
    client.zadd(expiry, {bucket: seconds * 1000 - 1})
    (charge,) = await admitted(routers, RateLimits(requests_per_minute=600, tokens_per_minute=6000), 1, 10)
    assert client.hget(bucket, "requests") == b"1", "the first one is forgotten"
    await routers[0].settle(charge, None)
    client.close()


async def test_without_limits_redis_is_not_asked(namespace):
    quota = Quota("redis://127.0.0.1:1", namespace, CollectorRegistry())
    assert await quota.charge("t", NO_LIMITS, 5) is None
    assert unchecked(quota) == 0
    await quota.close()


async def test_every_request_is_admitted_while_redis_is_down(tmp_path, namespace, caplog):
    server = EmbeddedRedis.start(tmp_path / "redis")
    quota = Quota(server.url, namespace, CollectorRegistry())
    limits = RateLimits(requests_per_minute=1)
    with caplog.at_level(logging.INFO, logger="router.quota.scripts"):
        await admitted([quota], limits, 1, 1)
        before = unchecked(quota)
        os.kill(server.pid, signal.SIGSTOP)
        began = time.monotonic()
        uncertain = await quota.charge("t", limits, 1)
        assert uncertain is not None and not uncertain.certain
        for _ in range(4):
            assert await quota.charge("t", limits, 1) is None
        assert time.monotonic() - began < 2.0
        os.kill(server.pid, signal.SIGCONT)
        server.process.kill()
        server.process.wait(10)
        await asyncio.sleep(RETRY_SECONDS)
        uncertain = await quota.charge("t", limits, 1)
        assert uncertain is not None and not uncertain.certain
        assert unchecked(quota) - before == 6
        server = EmbeddedRedis.start(tmp_path / "redis")
        assert len(await admitted([quota], limits, 1, 1)) == 1
        assert not await admitted([quota], limits, 1, 1), "and counts again"
    said = [record.message for record in caplog.records if "not checked" in record.message]
    assert len(said) == len([r for r in caplog.records if "checked again" in r.message]), "once each time"
    await quota.close()
    server.stop()
