"""Tenants' requests and tokens a minute, charged before a request is placed and settled when it has ended.

Buckets live in Redis, one script call a charge, so all routers count together. Where Redis is gone or slow everybody
is let in: a limit is not worth a failed request.

A request whose client goes on at another router is charged once. Beside the bucket Redis keeps a record of the charge:

    charged by A ──settled by A: finished──► forgotten
       │   └──settled by A: unfinished──┐
       ▼ A died, or was left            ▼
    taken over by B: only what it needs beyond A's charge is charged ──settled by B──► done

What A used and its client does not resume with is charged as well: by A's settlement if A lives after all, by B's charge
if A has settled. A client that resumes without a token is charged like a new one, and each takeover after the first costs
a request.

A call without an answer (timed out, or cancelled) may have been applied or not. Charge and settlement carry the charge's
owner, by which Redis applies each once, however often it is repeated and however late it arrives. A settlement is
repeated until it is answered or too old.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from dataclasses import dataclass, field, replace
from importlib import resources

import redis
from prometheus_client import CollectorRegistry

from cluster.background_tasks import FollowUps
from cluster.errors import OverloadedError
from cluster.security.keys import RateLimits
from cluster.telemetry.metrics import router as metrics
from router.placement.redis_backoff import RedisBackoff
from router.placement.script_call import Argument, ScriptCall
from router.quota.unsettled import Unsettled

log = logging.getLogger(__name__)
CALL_SECONDS = 0.1
RETRY_SECONDS = 0.5  # while Redis is gone, only every so often a request waits for it
TAKE_BACK_SECONDS = 0.5  # after a call was left; taken back at once, a slow one could charge behind that
EXPECTED_OUTPUT_TOKENS = 256  # of one choice, at most: most answers end before their max_tokens
_LIMITS = ("requests_per_minute", "tokens_per_minute")


def _lua(name: str) -> str:
    return resources.files("router.quota").joinpath(name).read_text()


def script_source(name: str) -> str:
    """Source of a script with records.lua in front."""
    return _lua("records.lua") + _lua(name)


@dataclass(frozen=True)
class Claim:
    """Which request a charge is for. `again`: its client says that another router has charged it, and holds
    `held_tokens` of its answer. `seconds`: how long the charge can stay unsettled."""

    name: str = field(default_factory=lambda: secrets.token_hex(16))
    again: bool = False
    held_tokens: int = 0
    seconds: float = 660.0


@dataclass(frozen=True)
class Charge:
    """What one request was charged; `settle` needs it. Not `certain`: if it was, only its record in Redis knows."""

    tenant: str
    limits: RateLimits
    tokens: int
    claim: Claim
    owner: str = field(default_factory=lambda: secrets.token_hex(8))
    certain: bool = True


@dataclass(frozen=True)
class Use:
    """What a request has used, over all the routers it took. Not `finished`: its client may yet go on elsewhere."""

    prompt_tokens: int
    output_tokens: int
    finished: bool = True


@dataclass(frozen=True, eq=False)
class _Settlement:
    charge: Charge
    arguments: tuple[Argument, ...]


class Quota:
    def __init__(self, redis_url: str, namespace: str, registry: CollectorRegistry):
        self._charge = ScriptCall(redis_url, script_source("charge.lua"))
        self._settle = ScriptCall(redis_url, script_source("settle.lua"))
        self._shared_keys = [f"{{{namespace}}}:quota-{name}" for name in ("expiry", "applied")]
        self._prefix = f"{{{namespace}}}:quota:"
        self._records = f"{{{namespace}}}:quota-request:"
        self._rest = RedisBackoff(RETRY_SECONDS)
        self._unsettled: Unsettled[_Settlement] = Unsettled()
        self._repeating = False
        self._closed = asyncio.Event()
        self.seconds = metrics.REDIS_CALLS.create()
        self.errors = 0  # calls that Redis did not answer in time
        self._is_down = False
        self._follow_ups = FollowUps()
        self.unchecked = metrics.QUOTA_UNCHECKED.create(registry)
        self.taken_over = metrics.QUOTA_TAKEN_OVER.create(registry)
        self.refused = metrics.QUOTA_REFUSED.create(registry, _LIMITS)

    async def charge(
        self, tenant: str, limits: RateLimits, tokens: int, claim: Claim | None = None
    ) -> Charge | None:
        """`tokens`: what the request is expected to use, over all the routers it takes. None: nothing was charged,
        nothing is to be settled.

        Raises OverloadedError, which says which limit it was and when there is room again.
        """
        if not limits:
            return None
        if not self._rest.may_ask():
            self.unchecked.inc()
            return None
        charge = Charge(tenant, limits, tokens, claim or Claim())
        arguments = (
            limits.requests_per_minute or 0,
            limits.tokens_per_minute or 0,
            tokens,
            charge.owner,
            int(charge.claim.again),
            charge.claim.held_tokens,
            int(charge.claim.seconds * 1000),
        )
        try:
            answer = await self._call(self._charge, charge, arguments)
        except asyncio.CancelledError:
            self._follow_ups.spawn(self._take_back(charge))
            raise
        if answer is None:
            self.unchecked.inc()
            return replace(charge, certain=False)
        which, wait_milliseconds, taken_over = answer
        self.taken_over.inc(taken_over)
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
        return charge

    async def settle(self, charge: Charge, use: Use | None) -> None:
        """Once per charge. None: it was not served, and gets its place back too."""
        arguments = (
            charge.owner,
            charge.tokens,
            use.prompt_tokens if use else 0,
            use.output_tokens if use else 0,
            int(use is not None),
            int(use is None or use.finished),
            charge.limits.tokens_per_minute or 0,
            int(charge.certain),
        )
        settlement = _Settlement(charge, arguments)
        said = False
        try:
            said = self._rest.may_ask() and await self._say(settlement)
        finally:
            if not said:
                self._keep(settlement)

    async def _say(self, settlement: _Settlement) -> bool:
        return await self._call(self._settle, settlement.charge, settlement.arguments) is not None

    def _keep(self, settlement: _Settlement) -> None:
        self._unsettled.add(settlement)
        if not self._repeating:
            self._repeating = True
            self._follow_ups.spawn(self._say_again())

    async def _say_again(self) -> None:
        """Repeat settlements until none waits. When the router closes, each gets one last try while Redis answers."""
        try:
            while (settlement := self._unsettled.oldest()) is not None:
                if self._rest.may_ask() and await self._say(settlement):
                    self._unsettled.done(settlement)
                elif self._closed.is_set():
                    return
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(RETRY_SECONDS / 2):
                            await self._closed.wait()
        finally:
            self._repeating = False

    @property
    def unsettled(self) -> int:
        """Settlements that wait for Redis."""
        return len(self._unsettled)

    @property
    def settlements_dropped(self) -> int:
        return self._unsettled.dropped

    async def _take_back(self, charge: Charge) -> None:
        await asyncio.sleep(TAKE_BACK_SECONDS)
        await self.settle(replace(charge, certain=False), None)

    async def _call(
        self, script: ScriptCall, charge: Charge, arguments: tuple[Argument, ...]
    ) -> list[int] | None:
        """None: Redis did not answer in time."""
        began = time.monotonic()
        try:
            keys = [self._prefix + charge.tenant, self._records + charge.claim.name, *self._shared_keys]
            answer = await script(keys, arguments, CALL_SECONDS)
        except (redis.RedisError, TimeoutError, OSError) as error:
            self.errors += 1
            self._rest.failed()
            if not self._is_down:
                log.warning("quotas are not checked while Redis does not answer: %s", error or "too slow")
            self._is_down = True
            return None
        self.seconds.observe(time.monotonic() - began)
        self._rest.answered()
        if self._is_down:
            log.info("quotas are checked again")
        self._is_down = False
        return answer if isinstance(answer, list) else []

    async def close(self) -> None:
        await self._follow_ups.wait(TAKE_BACK_SECONDS + CALL_SECONDS)
        self._closed.set()
        await self._follow_ups.wait(2 * CALL_SECONDS)
        await self._charge.close()
        await self._settle.close()
