"""One request that several routers charge: its client resumes it at another router."""

from __future__ import annotations

import pytest

from cluster.errors import OverloadedError
from cluster.security.keys import RateLimits
from router.quota.quota import ChargedRequest, Use
from tests.router.quota.charging import EXPECTED, PROMPT, charged


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


async def test_a_resumed_request_that_was_never_charged_is_charged(routers, bucket):
    await charged(routers[0], ChargedRequest("r", again=True, held_tokens=50))
    assert bucket() == (1, 3)


async def test_a_router_left_alive_pays_for_tokens_its_client_did_not_take(routers, bucket):
    one, two = routers
    first = await charged(one, ChargedRequest("r"))
    second = await charged(two, ChargedRequest("r", again=True, held_tokens=1000))
    await one.settle(first, Use(PROMPT, 13_000, finished=False))  # 12,000 of them reached no client
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


async def test_a_request_that_its_client_left_is_resumed(routers, bucket):
    one, two = routers
    first = await charged(one, ChargedRequest("r"))
    await one.settle(first, Use(PROMPT, 4000, finished=False))
    assert bucket() == (1, 5)
    second = await charged(two, ChargedRequest("r", again=True, held_tokens=4000), 8000)
    assert bucket() == (1, 8)
    await two.settle(second, Use(PROMPT, 5000))
    assert bucket() == (1, 6)


async def test_tokens_that_a_client_does_not_resume_with_are_charged_again(routers, bucket):
    one, two = routers
    first = await charged(one, ChargedRequest("r"))
    await one.settle(first, Use(PROMPT, 4000, finished=False))
    second = await charged(two, ChargedRequest("r", again=True, held_tokens=1000), 5000)
    assert bucket() == (1, 5 + 3)
    await two.settle(second, Use(PROMPT, 4000))
    assert bucket() == (1, 5 + 3), "the prompt once, 7,000 tokens of output"


async def test_one_ticket_does_not_run_a_request_many_times_for_one_charge(routers, bucket):
    """Its client leaves each router at the end of the answer, and claims each time to have no tokens."""
    for turn in range(10):
        request = ChargedRequest("r", again=turn > 0)
        charge = await charged(routers[turn % 2], request, 5000)
        await routers[turn % 2].settle(charge, Use(PROMPT, 4000, finished=False))
        assert bucket() == (turn + 1, 5 * (turn + 1))


async def test_two_concurrent_requests_are_charged_twice(routers, bucket):
    """Without a token in hand, a request helps only those whose first router is dead."""
    one, two = routers
    first = await charged(one, ChargedRequest("r"))
    second = await charged(two, ChargedRequest("r", again=True))
    await one.settle(first, Use(PROMPT, 9000))
    await two.settle(second, Use(PROMPT, 9000))
    assert bucket() == (2, 20)


async def test_an_ended_request_cannot_be_resumed(routers, bucket):
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
    assert ends is not None
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
