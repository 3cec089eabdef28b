"""What both doors share: validation, admission, and the measuring of every request."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import replace

from cluster.errors import DrainingError, OverloadedError
from cluster.security.key_file import ApiKeys
from cluster.security.keys import ANYONE, Caller, RateLimits
from router.admission.limits import ByteBudget, ConcurrencyLimiter, HeldBytes, check_priority
from router.admission.low_priority import LowPriority
from router.dispatch.dispatcher import RequestDispatcher
from router.dispatch.services import Services
from router.observe.live.live import Live, OwnState
from router.observe.live.report import RouterState
from router.observe.requests import RouterMetrics
from router.observe.traces.arrival import Arrival
from router.quota.quota import Use
from router.request.completion import Completion
from router.request.disclosure import check_explain
from router.request.prefix_scope import prefix_scope
from router.request.validator import Validator
from router.text.contents import Rendered


class RequestGateway:
    def __init__(self, services: Services, metrics: RouterMetrics, keys: ApiKeys):
        self.services = services
        self.text = services.text
        self.config = services.config
        self.validator = Validator(services.config, services.text)
        self.created_unix_seconds = int(time.time())
        self.started = time.monotonic()
        self.metrics = metrics
        self.keys = keys
        self._tenants = ConcurrencyLimiter("tenant")
        self._connections = ConcurrencyLimiter("connection")
        self.low_priority = LowPriority()
        self._bodies = ByteBudget.of(services.config, metrics.overloaded)
        self.in_flight = 0
        metrics.in_flight.set_function(lambda: self.in_flight)
        self.leaving = False  # not ready: load balancers should send no new requests
        self.closed = False  # requests that still arrive are refused, except on the connections below
        # Connections without an answer yet that announces the shutdown
        self._last_words: frozenset[str] = frozenset()
        self.requests = 0
        self.live = Live(services, metrics, self._own_state)

    async def encode(
        self, given: str | Rendered, *, special: bool = True, truncated: bool = False, tenant: str = ""
    ) -> list[int]:
        """Tokenise a prompt. Raises ContextLengthError or InvalidRequestError before tokenising a text that is too long;
        one that will be `truncated` may exceed the context."""
        self.validator.check_text(given if isinstance(given, str) else given.text, truncated=truncated)
        return await self.text.encode(given, special=special, tenant=tenant)

    @contextlib.contextmanager
    def place(self, caller: Caller = ANYONE, connection: str = "") -> Iterator[HeldBytes]:
        """Hold a place for a request from its head on: the router's, its tenant's and its connection's.

        Yields what its body takes of the budget for bodies. Raises OverloadedError when a place is not free, DrainingError
        when this router leaves.
        """
        with contextlib.ExitStack() as places:
            try:
                self._take(places, caller, connection)
            except OverloadedError:
                self.metrics.overloaded(caller.tenant)
                raise
            held = self._bodies.hold(caller.tenant)
            places.callback(held.release)
            yield held

    @contextlib.contextmanager
    def request(
        self,
        completion: Completion,
        caller: Caller = ANYONE,
        first_shown: int = 0,
        arrival: Arrival | None = None,
    ) -> Iterator[RequestDispatcher]:
        """Measure a request that holds a place, from its dispatch to its end.

        Raises ForbiddenError for what the caller's key does not allow.
        """
        check_explain(completion, caller)
        check_priority(completion, caller)
        self.requests += 1
        dispatcher = RequestDispatcher(self._owned(completion, caller), self.services, first_shown, arrival)
        with self.metrics.request(dispatcher):
            yield dispatcher

    @contextlib.asynccontextmanager
    async def counted(self, caller: Caller) -> AsyncIterator[None]:
        """Charge the tenant's quota one request that no worker sees. Raises OverloadedError."""
        quota = self.services.quota
        limits = replace(self._rate_limits(caller), tokens_per_minute=None)
        charge = await quota.charge(caller.tenant, limits, 0) if caller.tenant else None
        try:
            yield
        finally:
            if charge is not None:
                await quota.settle(charge, Use(0, 0))

    def leave(self) -> None:
        """From now on probes say no; requests that come are still taken."""
        self.leaving = True

    def refuse_new(self, but: Collection[str] = ()) -> None:
        """`but`: connections whose clients had no chance yet to hear that this router leaves."""
        self.leaving = self.closed = True
        self._last_words = frozenset(but)

    def _take(self, places: contextlib.ExitStack, caller: Caller, connection: str) -> None:
        if self.closed and connection not in self._last_words:
            raise DrainingError("this router is leaving; ask another one", retry_after_seconds=1.0)
        limit = self.config.max_concurrent_requests
        if self.in_flight >= limit:
            raise OverloadedError(
                f"this router has {limit} requests in flight", limit=str(limit), retry_after_seconds=1.0
            )
        if caller.tenant:
            own = caller.max_concurrent_requests or self.config.max_concurrent_requests_per_tenant
            self._tenants.take(caller.tenant, own or max(1, limit // 2))  # no key takes every place
            places.callback(self._tenants.give_back, caller.tenant)
        if connection:
            self._connections.take(connection, self.config.max_concurrent_requests_per_connection)
            places.callback(self._connections.give_back, connection)
        self.in_flight += 1
        places.callback(self._leave)

    def _leave(self) -> None:
        self.in_flight -= 1

    def _owned(self, completion: Completion, caller: Caller) -> Completion:
        """The request with its owner, who decides with whom it shares prefixes."""
        shared = self.config.share_prefixes_across_tenants
        scope = prefix_scope("" if shared else caller.tenant, completion.cache_salt)
        if not caller.tenant:
            return replace(completion, prefix_scope=scope) if scope else completion
        return replace(
            completion,
            tenant=caller.tenant,
            weight=caller.weight,
            rate_limits=self._rate_limits(caller),
            prefix_scope=scope,
        )

    def _own_state(self) -> OwnState:
        state: RouterState = "draining" if self.leaving else "ready" if self.ready() else "not ready"
        return OwnState(state, time.monotonic() - self.started, self.in_flight)

    def _rate_limits(self, caller: Caller) -> RateLimits:
        """The key's own go before the router's."""
        own, config = caller.rate_limits, self.config
        return RateLimits(
            own.requests_per_minute or config.requests_per_minute_per_tenant or None,
            own.tokens_per_minute or config.tokens_per_minute_per_tenant or None,
        )

    def ready(self) -> bool:
        """Can a request be served now?"""
        return not self.why_not_ready()

    def why_not_ready(self) -> list[str]:
        if self.leaving:
            return ["draining: this router leaves"]
        members = self.services.members
        if not members.decode:
            return ["no decode worker is there"]
        if not members.prefill and self.services.placement.mode == "never":
            return ["no prefill worker is there"]
        return []
