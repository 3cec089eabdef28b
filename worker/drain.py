"""How a worker leaves so that nobody loses a token.

placed on no more ─► what runs finishes ──┬─► idle ─► leaves
   what has not begun goes back at once   │
   (if another worker can take it)        ├─ migrate_seconds, and another worker can take it ─► goes back ─► leaves
                                          └─ drain_seconds ───────────────────────────────────► goes back ─► leaves

"Goes back": the attempt ends at its position, and the router dispatches the request again from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from cluster.errors import BatonError

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.02
SUCCESSOR_SECONDS = 0.5  # how often the registry is asked
END_SECONDS = 2.0  # for routers to read how their attempts ended
GIVE_BACK_SECONDS = 10.0  # for an engine in the middle of a step to let go


class Leaving(Protocol):
    """A role, as it is drained."""

    def idle(self) -> bool:
        """Nothing is left that a router reads."""
        ...

    async def give_back_waiting(self) -> None:
        """Ends what has not begun."""
        ...

    async def give_back_running(self) -> None:
        """Ends everything, each attempt at its position."""
        ...

    def failed(self, word: BatonError) -> None:
        """The worker has failed: EngineFailedError ends the attempts in the engine, any other error all attempts."""
        ...


async def drain(
    role: Leaving,
    *,
    healthy: Callable[[], bool],
    has_successor: Callable[[], Awaitable[bool]],
    migrate_seconds: float,
    drain_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns when the role is idle, or its time is up and it has given back what it still had."""
    began = clock()
    asked, successor = -SUCCESSOR_SECONDS, False
    while not role.idle() and healthy():
        elapsed = clock() - began
        if elapsed >= drain_seconds:
            break
        if elapsed - asked >= SUCCESSOR_SECONDS:
            asked, successor = elapsed, await has_successor()
        if successor:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GIVE_BACK_SECONDS):
                    await role.give_back_waiting()
            if elapsed >= migrate_seconds:
                break
        await asyncio.sleep(LOOK_SECONDS)
    if role.idle() or not healthy():
        return
    log.info("giving back what has not finished")
    try:
        async with asyncio.timeout(GIVE_BACK_SECONDS):
            await role.give_back_running()
    except TimeoutError:
        log.error("not everything could be given back within %.0f s", GIVE_BACK_SECONDS)
    deadline = clock() + END_SECONDS
    while not role.idle() and clock() < deadline:
        await asyncio.sleep(LOOK_SECONDS)
