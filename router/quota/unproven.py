"""Resume tickets that are not checked yet, of tenants whose requests are used up.

A ticket covers the prompt's tokens, so it is checked once they are there. Until then it may be made up, and tokenising
costs as much for a request that is refused afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from weakref import WeakValueDictionary


class UnprovenTickets:
    """Lets one request with such a ticket of each tenant be prepared at a time, and none after a ticket that did not
    prove valid, until the tenant has requests again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._barred: dict[str, float] = {}  # tenants, and until when

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str, until: float, seconds: float) -> AsyncIterator[bool]:
        """Wait for the tenant's turn, `seconds` at most. Yields whether the request may be prepared.

        The tenant is barred from then on, until its requests are available again (`until`) or a ticket proved valid.
        """
        lock = self._turns.setdefault(tenant, asyncio.Lock())
        try:
            await asyncio.wait_for(lock.acquire(), seconds)
        except TimeoutError:
            yield False
            return
        try:
            may = self._barred.get(tenant, 0.0) <= self._clock()
            if may:
                self._barred[tenant] = until
            yield may
        finally:
            lock.release()

    def proven(self, tenant: str) -> None:
        """A ticket of the tenant was valid."""
        self._barred.pop(tenant, None)
