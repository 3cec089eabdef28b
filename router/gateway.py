"""What the HTTP and the gRPC endpoint share: validation, admission, and the measuring of every request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from cluster.errors import DeadlineError, ForbiddenError, InvalidRequestError
from cluster.security.key_file import ApiKeys
from cluster.security.keys import ANYONE, Caller, RateLimits
from router.admission.admission import Admission
from router.admission.low_priority import LowPriority
from router.dispatch.dispatcher import RequestDispatcher
from router.dispatch.services import Services
from router.observe.live.live import Live
from router.observe.live.report import Counts, RouterReport, RouterState
from router.observe.requests import RouterMetrics
from router.observe.traces import Arrival
from router.processes.member import Member
from router.quota.quota import Use
from router.request.completion import Completion, prefix_scope
from router.request.grammars import GrammarChecks
from router.request.validator import Validator
from router.text.contents import Rendered

T = TypeVar("T")


class RequestGateway:
    member: Member | None = None  # of the router's processes; None: there is one

    def __init__(
        self, services: Services, metrics: RouterMetrics, keys: ApiKeys, member: Member | None = None
    ):
        self.services = services
        self.text = services.text
        self.config = services.config
        self.validator = Validator(services.config, services.text)
        self.grammars = GrammarChecks(
            services.text.tokenizer_json(), services.text.vocab_size, services.text.eos_token_ids
        )
        self.created_unix_seconds = int(time.time())
        self.started = time.monotonic()
        self.metrics = metrics
        self.keys = keys
        self.low_priority = LowPriority()
        self.member = member
        tallies = member.tallies() if member is not None else None
        self.admission = Admission(services.config, metrics.overloaded, tallies)
        metrics.in_flight.set_function(lambda: self.admission.in_flight)
        self.leaving = False  # not ready: load balancers should send no new requests
        self.requests = 0
        self.live = Live(services, metrics, self._report)

    async def encode(
        self,
        given: str | Rendered,
        *,
        special: bool = True,
        truncated: bool = False,
        tenant: str = "",
        cache_salt: str = "",
    ) -> list[int]:
        """Tokenise a prompt. Raises ContextLengthError or InvalidRequestError before tokenising a text that is too long;
        one that will be `truncated` may exceed the context."""
        self.validator.check_text(given if isinstance(given, str) else given.text, truncated=truncated)
        scope = self._prefix_scope(tenant, cache_salt)
        return await self._in_time(self.text.encode(given, special=special, tenant=tenant, scope=scope))

    async def decode(self, ids: Sequence[int], *, tenant: str = "") -> str:
        """The text of a prompt given as tokens, which have been checked."""
        return await self._in_time(self.text.decode(ids, tenant=tenant))

    async def render(
        self,
        read: Callable[[], Sequence[Mapping[str, str]]],
        characters: int,
        reasoning_effort: str | None = None,
        *,
        truncated: bool = False,
        tenant: str = "",
    ) -> Rendered:
        """Render the conversation that `read` returns (ModelText.chat). Raises ContextLengthError or InvalidRequestError
        before special tokens are searched in contents that are too long."""

        def checked() -> Sequence[Mapping[str, str]]:
            messages = read()
            size = sum(len(message["content"]) for message in messages)
            self.validator.check_contents(size, truncated=truncated)
            return messages

        return await self._in_time(self.text.chat(checked, characters, reasoning_effort, tenant=tenant))

    async def _in_time(self, work: Awaitable[T]) -> T:
        """Raises DeadlineError where the threads are not free, or not done, within `request_seconds`."""
        seconds = self.config.request_seconds
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            late = f"prompt: it was not tokenised within {seconds:g} s (request_seconds)"
            raise DeadlineError(late, field="prompt", limit=f"{seconds:g} s") from None

    @contextlib.asynccontextmanager
    async def preparing(self, caller: Caller, *, resumed: bool = False) -> AsyncIterator[None]:
        """Enter before a prompt is tokenised, and leave once its request is checked: one that is refused meanwhile counts
        as a request of the tenant's quota. A tenant whose requests are used up does not enter, unless its request is
        `resumed`, which may have been charged before. Raises OverloadedError."""
        if caller.tenant and not resumed:
            self.services.quota.check(caller.tenant, self._rate_limits(caller))
        try:
            yield
        except (InvalidRequestError, ForbiddenError):
            if caller.tenant:
                async with self.counted(caller):
                    pass
            raise

    @contextlib.contextmanager
    def request(
        self,
        completion: Completion,
        caller: Caller = ANYONE,
        first_shown: int = 0,
        arrival: Arrival | None = None,
    ) -> Iterator[RequestDispatcher]:
        """Measure an admitted request, from its dispatch to its end."""
        self.requests += 1
        if self.member is not None:
            self.member.count_request()
        dispatcher = RequestDispatcher(self._owned(completion, caller), self.services, first_shown, arrival)
        with self.metrics.request(dispatcher):
            yield dispatcher

    @contextlib.asynccontextmanager
    async def counted(self, caller: Caller) -> AsyncIterator[None]:
        """Charge the tenant's quota one request that no worker sees. Raises OverloadedError."""
        quota, limits = self.services.quota, self._rate_limits(caller)
        counts = caller.tenant and limits.requests_per_minute
        charge = await quota.charge(caller.tenant, limits, 0) if counts else None
        try:
            yield
        finally:
            if charge is not None:
                await quota.settle(charge, Use(0, 0))

    def leave(self) -> None:
        """Fail readiness probes from now on; new requests are still admitted."""
        self.leaving = True
        self.beat()

    def beat(self) -> None:
        """Report to the router's other processes."""
        if self.member is not None:
            self.member.beat(self.why_not_ready(), leaving=self.leaving)

    def refuse_new(self, unaware: Collection[str] = ()) -> None:
        """Admit nothing more, but on `unaware`: connections whose clients could not know yet that this router leaves."""
        self.leaving = True
        self.admission.close(unaware)

    def _owned(self, completion: Completion, caller: Caller) -> Completion:
        """The request with its tenant, on which depends with which requests it shares prefixes."""
        scope = self._prefix_scope(caller.tenant, completion.cache_salt)
        if not caller.tenant:
            return replace(completion, prefix_scope=scope) if scope else completion
        return replace(
            completion,
            tenant=caller.tenant,
            weight=caller.weight,
            rate_limits=self._rate_limits(caller),
            prefix_scope=scope,
        )

    def _prefix_scope(self, tenant: str, cache_salt: str) -> str:
        return prefix_scope("" if self.config.share_prefixes_across_tenants else tenant, cache_salt)

    def _report(self, counts: Counts) -> RouterReport:
        state: RouterState = "draining" if self.leaving else "ready" if self.ready() else "not ready"
        return RouterReport(state, time.monotonic() - self.started, self.admission.in_flight, counts)

    def _rate_limits(self, caller: Caller) -> RateLimits:
        """The key's own limits, else the router's."""
        own, config = caller.rate_limits, self.config
        return RateLimits(
            own.requests_per_minute or config.requests_per_minute_per_tenant or None,
            own.tokens_per_minute or config.tokens_per_minute_per_tenant or None,
        )

    def ready(self) -> bool:
        """Can a request be served now?"""
        return not self.why_not_ready()

    def why_not_ready(self) -> list[str]:
        """Why this process is not ready."""
        if self.leaving:
            return ["draining: this router leaves"]
        missing = self.services.placement.eligibility.missing_role()
        return [f"no {missing} worker is available"] if missing else []

    def why_router_not_ready(self) -> list[str]:
        """Why this router is not ready, over all its processes."""
        own = self.why_not_ready()
        return own if self.member is None else self.member.why_not_ready(own)
