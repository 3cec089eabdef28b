"""Charges of tests: through the routers in turn, repeated while Redis has not answered."""

from __future__ import annotations

import asyncio

from cluster.errors import OverloadedError
from cluster.security.keys import RateLimits
from router.quota.quota import ChargedRequest, Quota, QuotaCharge
from router.quota.scripts import RETRY_SECONDS

# So large that what leaks from the bucket within a second is less than half of the smallest.
PROMPT, EXPECTED = 1000, 3000
WIDE = RateLimits(requests_per_minute=10, tokens_per_minute=20_000)


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


async def charged(
    quota: Quota, request: ChargedRequest, tokens: int = EXPECTED, limits: RateLimits = WIDE
) -> QuotaCharge:
    for _ in range(20):
        charge = await quota.charge("t", limits, tokens, request)
        if charge is not None and charge.certain:
            return charge
        await asyncio.sleep(RETRY_SECONDS)
    raise AssertionError("Redis did not answer")
