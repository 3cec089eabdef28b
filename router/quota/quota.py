"""Tenants' requests and tokens per minute, charged before a request is placed and settled when it has ended.

Buckets live in Redis, with one script call per charge, so all routers count together. While Redis is away or slow, every
request is admitted.

A request that its client resumes at another router is charged once. Beside the bucket Redis keeps a record of the charge:

    charged by A ──settled by A: finished──► forgotten
       │   └──settled by A: unfinished──┐
       ▼ A died, or lost its client     ▼
    taken over by B: only what it needs beyond A's charge is charged ──settled by B──► done

Tokens that A made and that the client does not resume with are charged too: by A's settlement if A still runs, by B's
charge if A has settled. A client that resumes without a token is charged like a new one, and
each takeover after the first costs a request.

A call without an answer (timed out, or cancelled) may have been applied or not. Charge and settlement carry the charge's
owner, by which Redis applies each once, however often it is repeated and however late it arrives. A settlement is
repeated until it is answered or too old.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry

from cluster.background_tasks import BackgroundTasks
from cluster.errors import OverloadedError
from cluster.security.keys import RateLimits
from cluster.telemetry.metrics import router as metrics
from router.placement.script_call import Argument
from router.quota.scripts import CALL_SECONDS, RETRY_SECONDS, QuotaScripts
from router.quota.unproven import UnprovenTickets
from router.quota.unsettled import Unsettled

TAKE_BACK_SECONDS = 0.5  # after a cancelled call; taken back at once, a slow charge could arrive after that
EXPECTED_OUTPUT_TOKENS = 256  # of one choice, at most: most answers end before their max_tokens
_LIMITS = ("requests_per_minute", "tokens_per_minute")


def holder_of(tenant: str, model: str) -> str:
    """The owner of a bucket: a tenant, or what it may use of one model. Names are printable."""
    return f"{tenant}\0{model}" if model else tenant


@dataclass(frozen=True)
class ChargedRequest:
    """The request that a charge is for.

    `again`: another router has charged it, as its client proves, and the client holds `held_tokens` of its answer.
    `seconds`: how long the charge can stay unsettled.
    """

    name: str = field(default_factory=lambda: secrets.token_hex(16))
    again: bool = False
    held_tokens: int = 0
    seconds: float = 660.0


@dataclass(frozen=True)
class QuotaCharge:
    """The charge of one request, for `settle`. Not `certain`: it was charged only if Redis has a record of it."""

    tenant: str  # holder_of
    limits: RateLimits
    tokens: int
    request: ChargedRequest
    owner: str = field(default_factory=lambda: secrets.token_hex(8))
    certain: bool = True


@dataclass(frozen=True)
class Use:
    """Tokens that a request has used, at all its routers. Not `finished`: its client may resume it elsewhere."""

    prompt_tokens: int
    output_tokens: int
    finished: bool = True


@dataclass(frozen=True, eq=False)
class _Settlement:
    charge: QuotaCharge
    arguments: tuple[Argument, ...]


class Quota:
    def __init__(self, redis_url: str, namespace: str, registry: CollectorRegistry):
        self.scripts = QuotaScripts(redis_url, namespace)
        # Tenants without a request left: their limit per minute, and when there is one again.
        self._used_up: dict[str, tuple[int, float]] = {}
        self.tickets = UnprovenTickets()
        self._unsettled: Unsettled[_Settlement] = Unsettled()
        self._repeating = False
        self._closed = asyncio.Event()
        self._background_tasks = BackgroundTasks()
        self.unchecked = metrics.QUOTA_UNCHECKED.create(registry)
        self.taken_over = metrics.QUOTA_TAKEN_OVER.create(registry)
        self.refused = metrics.QUOTA_REFUSED.create(registry, _LIMITS)

    def check(self, tenant: str, limits: RateLimits, model: str = "") -> None:
        """Refuse a request whose tenant had no request left when it was last asked for, and has none since; before work
        that a charge can only follow. `model`: as for `charge`. Raises OverloadedError as that does."""
        wait = self._wait(tenant, limits, model)
        if wait > 0:
            raise self._refusal(limits, "requests_per_minute", wait, model)

    @contextlib.asynccontextmanager
    async def check_resumed(
        self, tenant: str, buckets: Sequence[tuple[RateLimits, str]], seconds: float
    ) -> AsyncIterator[None]:
        """`check` for a request with a resume ticket, to be held until the ticket is checked: if it is valid, the
        request was charged before, and `tickets.proven` must be called. Waits at most `seconds` for others of the
        tenant. `buckets`: limits, each with its model, as for `charge`. Raises OverloadedError."""
        wait = max(self._wait(tenant, *one) for one in buckets)
        if wait <= 0:
            yield
            return
        async with self.tickets.turn(tenant, time.monotonic() + wait, seconds) as may:
            if not may:
                for one in buckets:
                    self.check(tenant, *one)
            yield

    def _wait(self, tenant: str, limits: RateLimits, model: str = "") -> float:
        """Seconds until a tenant whose requests are used up has one again; none are: at most 0."""
        limit, until = self._used_up.get(holder_of(tenant, model), (0, 0.0))
        return until - time.monotonic() if limit == limits.requests_per_minute else 0.0

    def _refusal(self, limits: RateLimits, name: str, wait: float, model: str) -> OverloadedError:
        self.refused.labels(name).inc()
        limit = getattr(limits, name)
        of_model = f" for model {model!r}" if model else ""
        return OverloadedError(
            f"this tenant's {name.replace('_', ' ')}{of_model} are used up: {limit}",
            field=name,
            limit=str(limit),
            retry_after_seconds=max(0.001, wait),
        )

    async def charge(
        self,
        tenant: str,
        limits: RateLimits,
        tokens: int,
        request: ChargedRequest | None = None,
        model: str = "",
    ) -> QuotaCharge | None:
        """`tokens`: what the request is expected to use, at all its routers. `model`: the limits are the tenant's on this
        model. None: there is nothing to settle.

        Raises OverloadedError with the limit and the time until there is room again.
        """
        if not limits:
            return None
        if not self.scripts.may_ask():
            self.unchecked.inc()
            return None
        holder = holder_of(tenant, model)
        charge = QuotaCharge(holder, limits, tokens, request or ChargedRequest())
        arguments = (
            limits.requests_per_minute or 0,
            limits.tokens_per_minute or 0,
            tokens,
            charge.owner,
            int(charge.request.again),
            charge.request.held_tokens,
            int(charge.request.seconds * 1000),
        )
        try:
            answer = await self.scripts.charge(holder, charge.request.name, arguments)
        except asyncio.CancelledError:
            self._background_tasks.spawn(self._take_back(charge))
            raise
        if answer is None:
            self.unchecked.inc()
            return replace(charge, certain=False)
        which, wait_milliseconds, taken_over = answer
        self.taken_over.inc(taken_over)
        if which:
            name, wait = _LIMITS[which - 1], wait_milliseconds / 1000
            if name == "requests_per_minute":
                self._used_up[holder] = (limits.requests_per_minute or 0, time.monotonic() + wait)
            raise self._refusal(limits, name, wait, model)
        self._used_up.pop(holder, None)
        return charge

    async def settle(self, charge: QuotaCharge, use: Use | None) -> None:
        """Settle a charge, once. `use` None: the request was not served, and does not count as one."""
        if use is None:
            self._used_up.pop(charge.tenant, None)
        arguments = (
            charge.owner,
            charge.tokens,
            use.prompt_tokens if use else 0,
            use.output_tokens if use else 0,
            int(use is not None),
            int(use is None or use.finished),
            charge.limits.tokens_per_minute or 0,
            int(charge.certain),
            charge.limits.requests_per_minute or 0,
        )
        settlement = _Settlement(charge, arguments)
        sent = False
        try:
            sent = self.scripts.may_ask() and await self._send(settlement)
        finally:
            if not sent:
                self._keep(settlement)

    async def _send(self, settlement: _Settlement) -> bool:
        charge = settlement.charge
        return await self.scripts.settle(charge.tenant, charge.request.name, settlement.arguments)

    def _keep(self, settlement: _Settlement) -> None:
        self._unsettled.add(settlement)
        if not self._repeating:
            self._repeating = True
            self._background_tasks.spawn(self._settle_again())

    async def _settle_again(self) -> None:
        """Repeat settlements until none waits. When the router closes, each gets one last try while Redis answers."""
        try:
            while (settlement := self._unsettled.oldest()) is not None:
                if self.scripts.may_ask() and await self._send(settlement):
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

    async def _take_back(self, charge: QuotaCharge) -> None:
        await asyncio.sleep(TAKE_BACK_SECONDS)
        await self.settle(replace(charge, certain=False), None)

    async def close(self) -> None:
        await self._background_tasks.wait(TAKE_BACK_SECONDS + CALL_SECONDS)
        self._closed.set()
        await self._background_tasks.wait(2 * CALL_SECONDS)
        await self.scripts.close()
