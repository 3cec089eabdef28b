"""Which requests this router admits: limits on their number, in all, by tenant and by connection, and on the bytes of
their bodies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

from cluster.config.router import RouterConfig
from cluster.errors import DrainingError, OverloadedError
from cluster.security.keys import ANYONE, Caller
from router.admission.start_queue import StartQueue
from router.admission.tally import ALL, LocalTally, Tallies, Tally, local_tallies

RETRY_SECONDS = 1.0
MODEL_HOLDER = "\0model:"  # begins holders in the tally of tenants, whose names are printable


class ConcurrencyLimiter:
    """Counts requests in flight by holder."""

    def __init__(self, what: str, taken: Tally | None = None):
        """`taken`: default: of this process alone."""
        self._what = what
        self._taken = LocalTally() if taken is None else taken

    def acquire(self, holder: str, limit: int) -> None:
        """Raises OverloadedError when the holder has `limit`; 0 = no limit."""
        if self._taken.add(holder, 1) > limit > 0:
            self._taken.add(holder, -1)
            raise OverloadedError(
                f"this {self._what} has {limit} requests in flight",
                field=self._what,
                limit=str(limit),
                retry_after_seconds=RETRY_SECONDS,
            )

    def release(self, holder: str) -> None:
        self._taken.add(holder, -1)


# Of each body, which are not counted: their number is limited, so long bodies never make a short one refused.
FREE_BYTES = 1 << 16


class ByteBudget:
    """Bytes of bodies held for requests not yet dispatched, and what answers repeat of them, in all and by tenant, without
    FREE_BYTES of each."""

    def __init__(
        self,
        limit: int,
        tenant_limit: int,
        refused: Callable[[str], None],
        tallies: Tallies | None = None,
    ):
        """The tenant limit applies to named tenants. `refused` is called with the tenant of each refused body."""
        self._limit = limit
        self._tenant_limit = tenant_limit
        self._refused = refused
        tallies = local_tallies() if tallies is None else tallies
        self._all, self._tenants = tallies.bytes, tallies.tenant_bytes

    @classmethod
    def of(
        cls, config: RouterConfig, refused: Callable[[str], None], tallies: Tallies | None = None
    ) -> ByteBudget:
        """From the settings, but never too small for one body of the largest size."""
        least = config.max_body_bytes
        return cls(
            max(config.max_body_bytes_in_flight, least),
            max(config.max_body_bytes_in_flight_per_tenant, least),
            refused,
            tallies,
        )

    @property
    def held(self) -> int:
        """In this process."""
        return self._all.here(ALL)

    def hold(self, tenant: str) -> HeldBytes:
        return HeldBytes(self, tenant)

    def acquire(self, tenant: str, count: int) -> None:
        """Raises OverloadedError."""
        if self._all.add(ALL, count) > self._limit:
            self._all.add(ALL, -count)
            raise self._full(tenant, "this router", self._limit)
        if tenant and self._tenants.add(tenant, count) > self._tenant_limit:
            self.release(tenant, count)
            raise self._full(tenant, "this tenant", self._tenant_limit)

    def release(self, tenant: str, count: int) -> None:
        self._all.add(ALL, -count)
        if tenant:
            self._tenants.add(tenant, -count)

    def _full(self, tenant: str, whose: str, limit: int) -> OverloadedError:
        self._refused(tenant)
        return OverloadedError(
            f"{whose} has {limit} bytes of long bodies in flight",
            field="body",
            limit=str(limit),
            retry_after_seconds=RETRY_SECONDS,
        )


class HeldBytes:
    """One body's share of the budget."""

    def __init__(self, budget: ByteBudget, tenant: str):
        self.tenant = tenant
        self._budget = budget
        self._counted = 0

    def grow_to(self, size: int) -> None:
        """Raises OverloadedError; the share is then as before."""
        more = size - FREE_BYTES - self._counted
        if more > 0:
            self._budget.acquire(self.tenant, more)
            self._counted += more

    def keep(self, size: int) -> None:
        """From now on only so many bytes are held: of the body, or made from it. Raises OverloadedError if they are more
        than before and do not fit."""
        self.grow_to(size)
        less = self._counted - max(0, size - FREE_BYTES)
        if less > 0:
            self._budget.release(self.tenant, less)
            self._counted -= less

    def release(self) -> None:
        """May be called more than once."""
        if self._counted:
            self._budget.release(self.tenant, self._counted)
            self._counted = 0


class Admission:
    """Limits on the requests in flight: in all, by tenant, by connection, and on the bytes of their bodies. `starts`: the
    order in which those that have a place are started."""

    def __init__(self, config: RouterConfig, refused: Callable[[str], None], tallies: Tallies | None = None):
        """`refused` is called with the tenant of each request that is over a limit. `tallies`: of all processes of this
        router; default: of this one."""
        self._config = config
        self._refused = refused
        tallies = local_tallies() if tallies is None else tallies
        self._requests = tallies.requests
        self._tenants = ConcurrencyLimiter("tenant", tallies.tenant_requests)
        self._models = ConcurrencyLimiter("model", tallies.tenant_requests)
        self._connections = ConcurrencyLimiter("connection")
        self._bodies = ByteBudget.of(config, refused, tallies)
        self.starts = StartQueue()
        self._closed = False
        # Connections on which no answer has announced the shutdown yet
        self._unaware: frozenset[str] = frozenset()
        self.in_flight = 0  # in this process

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

    @contextlib.contextmanager
    def of_model(self, name: str) -> Iterator[None]:
        """Count a request as one of its model's, so that no model takes every place. Raises OverloadedError."""
        limit = self._config.most_of_model(name)
        if not limit:
            yield
            return
        holder = MODEL_HOLDER + name
        self._models.acquire(holder, limit)
        try:
            yield
        finally:
            self._models.release(holder)

    def close(self, unaware: Collection[str] = ()) -> None:
        """Admit nothing more, but on `unaware`: connections whose clients could not know yet that this router leaves."""
        self._closed = True
        self._unaware = frozenset(unaware)

    def _acquire(self, held: contextlib.ExitStack, caller: Caller, connection: str) -> None:
        config = self._config
        if self._closed and connection not in self._unaware:
            raise DrainingError("this router is leaving; ask another one", retry_after_seconds=1.0)
        limit = config.max_concurrent_requests
        held.callback(self._leave)
        if self._enter() > limit:
            raise OverloadedError(
                f"this router has {limit} requests in flight", limit=str(limit), retry_after_seconds=1.0
            )
        if caller.tenant:
            own = caller.max_concurrent_requests or config.max_concurrent_requests_per_tenant
            # One key never takes every place, nor every connection where there are fewer of them.
            share = max(1, min(limit, config.max_http_connections) // 2)
            self._tenants.acquire(caller.tenant, own or share)
            held.callback(self._tenants.release, caller.tenant)
        if connection:
            self._connections.acquire(connection, config.max_concurrent_requests_per_connection)
            held.callback(self._connections.release, connection)

    def _enter(self) -> int:
        """Returns the requests in flight in all processes."""
        self.in_flight += 1
        return self._requests.add(ALL, 1)

    def _leave(self) -> None:
        self.in_flight -= 1
        self._requests.add(ALL, -1)
