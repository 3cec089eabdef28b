"""Bounds on requests in flight: their number by tenant and connection, their class, the bytes of their bodies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from cluster.config.router import RouterConfig
from cluster.errors import ForbiddenError, OverloadedError
from cluster.security.keys import Caller
from router.placement.types import priority_class_of
from router.request.completion import Completion

RETRY_SECONDS = 1.0
_CLASSES = ("batch", "normal", "high")  # the lowest first


class ConcurrencyLimiter:
    """Counts requests in flight by holder; holders without any use no memory."""

    def __init__(self, what: str):
        self._what = what
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._taken)

    def acquire(self, holder: str, limit: int) -> None:
        """Raises OverloadedError when the holder has `limit`; 0 = no limit."""
        if limit and self._taken[holder] >= limit:
            raise OverloadedError(
                f"this {self._what} has {limit} requests in flight",
                field=self._what,
                limit=str(limit),
                retry_after_seconds=RETRY_SECONDS,
            )
        self._taken[holder] += 1

    def release(self, holder: str) -> None:
        self._taken[holder] -= 1
        if self._taken[holder] <= 0:
            del self._taken[holder]


# Of each body, which are not counted: their number is limited, so long bodies never make a short one refused.
FREE_BYTES = 1 << 16


class ByteBudget:
    """Bytes of bodies held for requests not yet dispatched, in all and by tenant, without FREE_BYTES of each."""

    def __init__(self, limit: int, tenant_limit: int, refused: Callable[[str], None]):
        """The tenant limit applies to named tenants. `refused` is called with the tenant of each refused body."""
        self._limit = limit
        self._tenant_limit = tenant_limit
        self._refused = refused
        self._tenants: Counter[str] = Counter()
        self.held = 0

    @classmethod
    def of(cls, config: RouterConfig, refused: Callable[[str], None]) -> ByteBudget:
        """From the settings, but never too small for one body of the largest size."""
        least = config.max_body_bytes
        return cls(
            max(config.max_body_bytes_in_flight, least),
            max(config.max_body_bytes_in_flight_per_tenant, least),
            refused,
        )

    def hold(self, tenant: str) -> HeldBytes:
        return HeldBytes(self, tenant)

    def acquire(self, tenant: str, count: int) -> None:
        """Raises OverloadedError."""
        if self.held + count > self._limit:
            raise self._full(tenant, "this router", self._limit)
        if tenant and self._tenants[tenant] + count > self._tenant_limit:
            raise self._full(tenant, "this tenant", self._tenant_limit)
        self.held += count
        self._tenants[tenant] += count

    def release(self, tenant: str, count: int) -> None:
        self.held -= count
        self._tenants[tenant] -= count
        if not self._tenants[tenant]:
            del self._tenants[tenant]

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

    def release(self) -> None:
        """May be called more than once."""
        if self._counted:
            self._budget.release(self.tenant, self._counted)
            self._counted = 0


def check_priority(completion: Completion, caller: Caller) -> None:
    """Raise ForbiddenError if the request's class is above its key's: it would overtake those of other tenants."""
    asked = priority_class_of(completion.priority)
    if _CLASSES.index(asked) > _CLASSES.index(caller.max_priority):
        raise ForbiddenError(
            f"priority: this API key allows at most {caller.max_priority}, not {asked}; "
            "max_priority of the key's entry raises it",
            field="priority",
            limit=caller.max_priority,
        )
