"""Drains a worker without losing a token of its requests.

no new requests ─► running attempts finish ──┬─► idle ─► leaves
   attempts that have not begun are          │
   returned at once, if there is a successor ├─ migrate_seconds, if there is a successor ─► all are returned ─► leaves
                                             └─ drain_seconds ────────────────────────────► all are returned ─► leaves

Successor: another worker that can take the requests, or several that together have all their adapters. Returned: the
attempt ends at its position, and the router dispatches the request again from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

log = logging.getLogger(__name__)
POLL_SECONDS = 0.02
SUCCESSOR_SECONDS = 0.5  # between two reads of the registry
END_SECONDS = 2.0  # for routers to read the ends of their attempts
RETURN_SECONDS = 10.0  # for the engine to end a step in progress


class DrainedRole(Protocol):
    """A role, as it is drained."""

    def idle(self) -> bool:
        """Whether no attempt is left, that is, the routers have read the ends of all."""

    async def return_waiting(self) -> None:
        """Return to the routers the attempts that have not begun."""

    async def return_all(self) -> None:
        """Return every attempt to its router, at its position."""


async def drain(
    role: DrainedRole,
    worker_id: str = "",
    *,
    healthy: Callable[[], bool],
    has_successor: Callable[[], Awaitable[bool]],
    migrate_seconds: float,
    drain_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return when the role is idle, or has returned its attempts at the time limit."""
    began = clock()
    checked, successor = -SUCCESSOR_SECONDS, False
    while not role.idle() and healthy():
        elapsed = clock() - began
        if elapsed >= drain_seconds:
            break
        if elapsed - checked >= SUCCESSOR_SECONDS:
            checked, successor = elapsed, await has_successor()
        if successor:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETURN_SECONDS):
                    await role.return_waiting()
            if elapsed >= migrate_seconds:
                break
        await asyncio.sleep(POLL_SECONDS)
    if role.idle() or not healthy():
        return
    log.info("%s: returning unfinished requests to their routers", worker_id)
    try:
        async with asyncio.timeout(RETURN_SECONDS):
            await role.return_all()
    except TimeoutError:
        log.error("%s: not all requests could be returned within %.0f s", worker_id, RETURN_SECONDS)
    deadline = clock() + END_SECONDS
    while not role.idle() and clock() < deadline:
        await asyncio.sleep(POLL_SECONDS)
