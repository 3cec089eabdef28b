"""Tenants' requests and tokens a minute, charged before a request is placed and settled when it has ended.

Buckets live in Redis, one script call a charge, so all routers count together. Where Redis is gone or slow everybody
is let in: a limit is not worth a failed request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from importlib import resources

import redis
from prometheus_client import CollectorRegistry, Counter

from cluster.auth.keys import RateLimits
from cluster.errors import OverloadedError
from router.placement.script_call import Argument, ScriptCall

log = logging.getLogger(__name__)
CALL_SECONDS = 0.1
RETRY_SECONDS = 0.5  # while Redis is gone, only every so often a request waits for it
EXPECTED_OUTPUT_TOKENS = 256  # of one choice, at most: most answers end before their max_tokens
_LIMITS = ("requests_per_minute", "tokens_per_minute")


def _lua(name: str) -> str:
    return resources.files("router.quota").joinpath(name).read_text()


@dataclass(frozen=True)
class Charge:
    """What one request was charged; `settle` needs it."""

    tenant: str
    limits: RateLimits
    tokens: int


class Quota:
    def __init__(self, redis_url: str, namespace: str, registry: CollectorRegistry):
        self._charge = ScriptCall(redis_url, _lua("charge.lua"))
        self._settle = ScriptCall(redis_url, _lua("settle.lua"))
        self._prefix = f"{{{namespace}}}:quota:"
        self._down_until = 0.0
        self._is_down = False
        self.unchecked = Counter(
            "baton_quota_unchecked_total",
            "Requests let in without a look at their tenant's quota: Redis was gone",
            registry=registry,
        )
        self.refused = Counter(
            "baton_quota_refused_total", "Requests beyond their tenant's quota", ["limit"], registry=registry
        )

    async def charge(self, tenant: str, limits: RateLimits, tokens: int) -> Charge | None:
        """`tokens`: what the request is expected to use. None: nothing was charged, nothing is to be settled.

        Raises OverloadedError, which says which limit it was and when there is room again.
        """
        if not limits:
            return None
        arguments = (limits.requests_per_minute or 0, limits.tokens_per_minute or 0, tokens)
        answer = await self._call(self._charge, tenant, arguments)
        if answer is None:
            self.unchecked.inc()
            return None
        which, wait_milliseconds = answer
        if which:
            name = _LIMITS[which - 1]
            self.refused.labels(name).inc()
            limit = getattr(limits, name)
            raise OverloadedError(
                f"this tenant's {name.replace('_', ' ')} are used up: {limit}",
                field=name,
                limit=str(limit),
                retry_after_seconds=max(0.001, wait_milliseconds / 1000),
            )
        return Charge(tenant, limits, tokens)

    async def settle(self, charge: Charge, tokens: int, *, served: bool) -> None:
        """`tokens`: what it has used. A request that was not `served` gets its place back too."""
        limits = charge.limits
        if served and tokens == charge.tokens:
            return
        await self._call(
            self._settle,
            charge.tenant,
            (0 if served else 1, charge.tokens - tokens, limits.tokens_per_minute or 0),
        )

    async def _call(
        self, script: ScriptCall, tenant: str, arguments: tuple[Argument, ...]
    ) -> list[int] | None:
        """None: Redis did not answer in time."""
        if time.monotonic() < self._down_until:
            return None
        try:
            async with asyncio.timeout(CALL_SECONDS):
                answer = await script([self._prefix + tenant], arguments)
        except (redis.RedisError, TimeoutError, OSError) as error:
            self._down_until = time.monotonic() + RETRY_SECONDS
            if not self._is_down:
                log.warning("quotas are not checked while Redis does not answer: %s", error or "too slow")
            self._is_down = True
            return None
        if self._is_down:
            log.info("quotas are checked again")
        self._is_down = False
        return answer if isinstance(answer, list) else []

    async def close(self) -> None:
        await self._charge.close()
        await self._settle.close()
