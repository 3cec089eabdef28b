"""Charges whose answer from Redis came too late, or never."""

from __future__ import annotations

import asyncio

from router.quota.quota import ChargedRequest, Quota, QuotaCharge, Use
from router.quota.scripts import RETRY_SECONDS
from tests.harness.waiting import until
from tests.router.quota.charging import EXPECTED, WIDE, charged


async def warm(quota: Quota) -> None:
    """Load its scripts into Redis, open its connections, and empty its bucket."""
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
