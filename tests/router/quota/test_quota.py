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
from router.quota.quota import RETRY_SECONDS, ChargedRequest, Quota, QuotaCharge, Use
from tests.harness.waiting import until


@pytest.fixture
async def routers(redis_url, namespace, monkeypatch):
    # What a busy machine lets wait must not count as an outage: a call given up may have been charged.
    monkeypatch.setattr("router.quota.scripts.CALL_SECONDS", 10.0)
    made = [Quota(redis_url, namespace, CollectorRegistry()) for _ in range(2)]
    yield made
    for one in made:
        await one.close()


async def admitted(quotas: list[Quota], limits: RateLimits, count: int, tokens: int) -> list[QuotaCharge]:
    """Of `count` requests at once, through one router and the other by turns."""

    async def ask(number: int) -> QuotaCharge | None:
        # A busy machine may make Redis seem slow; then nothing was checked, and the request asks again.
        for _ in range(20):
            try:
                charge = await quotas[number % len(quotas)].charge("t", limits, tokens)
            except OverloadedError:
                return None
            if charge is not None and charge.certain:
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
    await one.settle(first, Use(60, 40))
    (second,) = await admitted([two], limits, 1, 800)
    await two.settle(second, Use(800, 1000))  # it went on for longer than anybody expected
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


async def test_who_was_not_served_pays_nothing(routers):
    limits = RateLimits(requests_per_minute=1, tokens_per_minute=100)
    for _ in range(3):
        (charge,) = await admitted(routers[:1], limits, 1, 100)
        await routers[1].settle(charge, None)


# --- one request, several routers ---------------------------------------------------------------------------

# So large that what leaks from the bucket within a second is less than half of the smallest.
PROMPT, EXPECTED = 1000, 3000
WIDE = RateLimits(requests_per_minute=10, tokens_per_minute=20_000)


@pytest.fixture
def bucket(redis_url, namespace):
    """(requests, thousands of tokens) in the tenant's bucket."""
    import redis

    client = redis.Redis.from_url(redis_url)

    def read() -> tuple[int, int]:
        used = client.hmget(f"{{{namespace}}}:quota:t", "requests", "tokens")
        return round(float(used[0] or 0)), round(float(used[1] or 0) / 1000)

    yield read
    client.close()


async def charged(
    quota: Quota, request: ChargedRequest, tokens: int = EXPECTED, limits: RateLimits = WIDE
) -> QuotaCharge:
    for _ in range(20):
        charge = await quota.charge("t", limits, tokens, request)
        if charge is not None and charge.certain:
            return charge
        await asyncio.sleep(RETRY_SECONDS)
    raise AssertionError("Redis did not answer")


async def test_a_request_whose_router_died_is_charged_once(routers, bucket):
    one, two = routers
    await charged(one, ChargedRequest("r"))
    again = await charged(two, ChargedRequest("r", again=True, held_tokens=1000), 4000)
    assert bucket() == (1, 4), "only what the rest is expected to need beyond the first charge"
    await two.settle(again, Use(PROMPT, 29_000))
    assert bucket() == (1, 30)
    assert two.taken_over._value.get() == 1


async def test_a_resumed_request_is_never_refused(routers):
    one, two = routers
    narrow = RateLimits(requests_per_minute=1, tokens_per_minute=EXPECTED)
    await charged(one, ChargedRequest("r"), limits=narrow)
    with pytest.raises(OverloadedError):
        await charged(two, ChargedRequest("other"), limits=narrow)
    with pytest.raises(OverloadedError):
        # The same name, without the request to be the same request
        await charged(two, ChargedRequest("r"), limits=narrow)
    assert await charged(two, ChargedRequest("r", again=True, held_tokens=5), 5000, narrow)


async def test_who_claims_what_was_never_charged_is_charged(routers, bucket):
    await charged(routers[0], ChargedRequest("r", again=True, held_tokens=50))
    assert bucket() == (1, 3)


async def test_a_router_that_was_only_left_pays_for_what_was_not_taken_along(routers, bucket):
    one, two = routers
    first = await charged(one, ChargedRequest("r"))
    second = await charged(two, ChargedRequest("r", again=True, held_tokens=1000))
    await one.settle(first, Use(PROMPT, 13_000, finished=False))  # 12,000 of them nobody got
    assert bucket() == (1, 3 + 12)
    await two.settle(second, Use(PROMPT, 5000))
    assert bucket() == (1, 6 + 12)


async def test_the_successor_may_settle_first(routers, bucket):
    one, two = routers
    first = await charged(one, ChargedRequest("r"))
    second = await charged(two, ChargedRequest("r", again=True, held_tokens=1000))
    await two.settle(second, Use(PROMPT, 5000))
    await one.settle(first, Use(PROMPT, 3000, finished=False))
    assert bucket() == (1, 6 + 2)


async def test_a_request_that_was_let_go_is_taken_up_again(routers, bucket):
    one, two = routers
    first = await charged(one, ChargedRequest("r"))
    await one.settle(first, Use(PROMPT, 4000, finished=False))
    assert bucket() == (1, 5)
    second = await charged(two, ChargedRequest("r", again=True, held_tokens=4000), 8000)
    assert bucket() == (1, 8)
    await two.settle(second, Use(PROMPT, 5000))
    assert bucket() == (1, 6)


async def test_what_a_client_does_not_resume_with_is_charged_again(routers, bucket):
    one, two = routers
    first = await charged(one, ChargedRequest("r"))
    await one.settle(first, Use(PROMPT, 4000, finished=False))
    second = await charged(two, ChargedRequest("r", again=True, held_tokens=1000), 5000)
    assert bucket() == (1, 5 + 3)
    await two.settle(second, Use(PROMPT, 4000))
    assert bucket() == (1, 5 + 3), "the prompt once, 7,000 tokens of output"


async def test_one_ticket_does_not_run_a_request_many_times_for_one_charge(routers, bucket):
    """Its client leaves each router at the end of the answer, and says each time that it has nothing of it."""
    for turn in range(10):
        request = ChargedRequest("r", again=turn > 0)
        charge = await charged(routers[turn % 2], request, 5000)
        await routers[turn % 2].settle(charge, Use(PROMPT, 4000, finished=False))
        assert bucket() == (turn + 1, 5 * (turn + 1))


async def test_asking_twice_at_once_is_paid_twice(routers, bucket):
    """Without a token in hand, a request helps only those whose first router is dead."""
    one, two = routers
    first = await charged(one, ChargedRequest("r"))
    second = await charged(two, ChargedRequest("r", again=True))
    await one.settle(first, Use(PROMPT, 9000))
    await two.settle(second, Use(PROMPT, 9000))
    assert bucket() == (2, 20)


async def test_what_has_ended_cannot_be_taken_over(routers, bucket):
    one, two = routers
    await one.settle(await charged(one, ChargedRequest("r")), Use(PROMPT, 1000))
    await charged(two, ChargedRequest("r", again=True, held_tokens=1000), 5000)
    assert bucket() == (2, 7)


async def test_a_charge_changes_hands_a_bounded_number_of_times(routers, bucket):
    limits = RateLimits(requests_per_minute=60, tokens_per_minute=20_000)
    for turn in range(41):
        await charged(routers[1], ChargedRequest("r", again=turn > 0, held_tokens=1), limits=limits)
    assert routers[1].taken_over._value.get() == 38, (
        "16 times, then it is a new request: 41 of them are three"
    )


async def test_each_takeover_after_the_first_costs_a_request(routers, bucket):
    """A ticket that is replayed runs a request 17 times; a router that dies is no replay."""
    limits = RateLimits(requests_per_minute=10, tokens_per_minute=1000)
    await charged(routers[0], ChargedRequest("r"), limits=limits)
    for turn in range(15):
        await charged(routers[turn % 2], ChargedRequest("r", again=True, held_tokens=1), limits=limits)
    assert bucket()[0] == 15, "the first one was free"
    with pytest.raises(OverloadedError):
        await charged(routers[0], ChargedRequest("another"), limits=limits)


async def test_a_takeover_without_a_token_costs_one_request_at_most(routers, bucket):
    """Whether or not the router before settles."""
    one, two = routers
    await charged(one, ChargedRequest("r"))
    second = await charged(two, ChargedRequest("r", again=True, held_tokens=1))
    third = await charged(one, ChargedRequest("r", again=True))
    await two.settle(second, Use(PROMPT, 1000, finished=False))
    await one.settle(third, Use(PROMPT, 1000))
    assert bucket()[0] == 2


async def test_records_are_forgotten(routers, redis_url, namespace):
    import redis

    client = redis.Redis.from_url(redis_url)
    settled = await charged(routers[0], ChargedRequest("settled"))
    await charged(routers[0], ChargedRequest("open", seconds=90))
    await routers[0].settle(settled, Use(PROMPT, 1))
    prefix, expiry = f"{{{namespace}}}:quota-request:", f"{{{namespace}}}:quota-expiry"
    assert client.exists(prefix + "settled") == 0
    now = client.time()[0] * 1000
    ends = client.zscore(expiry, prefix + "open")
    assert 80_000 < ends - now <= 91_000
    for left in range(20):  # others, whose time is over
        client.hset(f"{prefix}{left}", "owner", "dead")
        client.zadd(expiry, {f"{prefix}{left}": now - 1})
    for _ in range(4):
        await charged(routers[0], ChargedRequest(), tokens=1)
    assert not [left for left in range(20) if client.exists(f"{prefix}{left}")], "a sweep forgets them"
    assert client.exists(prefix + "open")
    assert [key for key in client.scan_iter(f"{{{namespace}}}:*") if client.pttl(key) != -1] == [], (
        "Redis may evict what has a time to live"
    )
    client.close()


@pytest.fixture
def paused(redis_url):
    """Redis takes calls for so many milliseconds, and executes them afterwards."""
    import redis

    client = redis.Redis.from_url(redis_url)
    yield client.client_pause
    client.client_unpause()
    client.close()


async def warm(quota: Quota) -> None:
    """Its scripts are known to Redis, its connections are open, and its bucket is empty."""
    await quota.settle(await charged(quota, ChargedRequest("warm"), 1000), None)


async def test_a_charge_whose_answer_came_too_late_is_settled_by_use(routers, bucket, paused, monkeypatch):
    quota = routers[0]
    await warm(quota)
    paused(500)
    with monkeypatch.context() as hurried:
        hurried.setattr("router.quota.scripts.CALL_SECONDS", 0.1)
        late = await quota.charge("t", WIDE, 9000, ChargedRequest("late"))
    assert late is not None and not late.certain
    await until(lambda: bucket() == (1, 9), "it was charged all the same")
    await asyncio.sleep(RETRY_SECONDS)
    await quota.settle(late, Use(1000, 1000))
    assert bucket() == (1, 2)


async def test_a_charge_that_was_never_made_is_not_given_back(routers, bucket):
    await charged(routers[0], ChargedRequest("first"))
    never = QuotaCharge("t", WIDE, 2000, ChargedRequest("never"), certain=False)
    await routers[0].settle(never, None)
    await routers[0].settle(never, Use(5000, 5000))
    assert bucket() == (1, EXPECTED // 1000)


async def test_a_charge_whose_request_was_cancelled_meanwhile_is_taken_back(
    routers, bucket, paused, monkeypatch
):
    monkeypatch.setattr("router.quota.quota.TAKE_BACK_SECONDS", 2.0)
    await warm(routers[0])
    paused(200)
    leaving = asyncio.create_task(routers[0].charge("t", WIDE, 9000, ChargedRequest("leaving")))
    await asyncio.sleep(0.05)
    leaving.cancel()
    await until(lambda: bucket() == (1, 9), "it was charged all the same")
    await until(lambda: bucket() == (0, 0), "and taken back")


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
    bucket, expiry = f"{{{namespace}}}:quota:t", f"{{{namespace}}}:quota-expiry"
    seconds, micros = client.time()
    assert 0 < client.zscore(expiry, bucket) - (seconds * 1000 + micros / 1000) <= 1200
    client.zadd(expiry, {bucket: seconds * 1000 - 1})
    (charge,) = await admitted(routers, RateLimits(requests_per_minute=600, tokens_per_minute=6000), 1, 10)
    assert client.hget(bucket, "requests") == b"1", "the first one is forgotten"
    await routers[0].settle(charge, None)
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
