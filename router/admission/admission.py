"""Which requests this router admits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

from cluster.config.router import RouterConfig
from cluster.errors import DrainingError, OverloadedError
from cluster.security.keys import ANYONE, Caller
from router.admission.limits import ByteBudget, ConcurrencyLimiter, HeldBytes


class Admission:
    """Limits on the requests in flight: in all, by tenant, by connection, and on the bytes of their bodies."""

    def __init__(self, config: RouterConfig, refused: Callable[[str], None]):
        """`refused` is called with the tenant of each request that is over a limit."""
        self._config = config
        self._refused = refused
        self._tenants = ConcurrencyLimiter("tenant")
        self._connections = ConcurrencyLimiter("connection")
        self._bodies = ByteBudget.of(config, refused)
        self._closed = False
        # Connections on which no answer has announced the shutdown yet
        self._unaware: frozenset[str] = frozenset()
        self.in_flight = 0

    @contextlib.contextmanager
    def admit(self, caller: Caller = ANYONE, connection: str = "") -> Iterator[HeldBytes]:
        """Count a request as in flight, from its head on. Yields its share of the budget for bodies.

        Raises OverloadedError when a limit is reached, DrainingError when this router leaves.
        """
        with contextlib.ExitStack() as held:
            try:
                self._acquire(held, caller, connection)
            except OverloadedError:
                self._refused(caller.tenant)
                raise
            body = self._bodies.hold(caller.tenant)
            held.callback(body.release)
            yield body

    def close(self, unaware: Collection[str] = ()) -> None:
        """Admit nothing more, but on `unaware`: connections whose clients could not know yet that this router leaves."""
        self._closed = True
        self._unaware = frozenset(unaware)

    def _acquire(self, held: contextlib.ExitStack, caller: Caller, connection: str) -> None:
        config = self._config
        if self._closed and connection not in self._unaware:
            raise DrainingError("this router is leaving; ask another one", retry_after_seconds=1.0)
        limit = config.max_concurrent_requests
        if self.in_flight >= limit:
            raise OverloadedError(
                f"this router has {limit} requests in flight", limit=str(limit), retry_after_seconds=1.0
            )
        if caller.tenant:
            own = caller.max_concurrent_requests or config.max_concurrent_requests_per_tenant
            self._tenants.acquire(caller.tenant, own or max(1, limit // 2))  # one key never takes every place
            held.callback(self._tenants.release, caller.tenant)
        if connection:
            self._connections.acquire(connection, config.max_concurrent_requests_per_connection)
            held.callback(self._connections.release, connection)
        self.in_flight += 1
        held.callback(self._leave)

    def _leave(self) -> None:
        self.in_flight -= 1
