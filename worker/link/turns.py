"""How much of a turn of the event loop the link port may take: handshakes that begin, and entries that are dispatched.

Addresses take turns in both: a flood from one address delays the links of others by one handshake, or one link's entries.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from cluster.open_connections import OpenConnections
from cluster.round_robin import RoundRobin

# Most of a handshake's work is done in the turn in which it begins.
HANDSHAKES_PER_TURN = 4
MAX_HANDSHAKES = 256  # at a time
ENTRIES_PER_TURN = 512  # of frames of all links: an empty frame counts as one
ENTRIES_AT_ONCE = 64  # of a link before the next one's turn


class Handshakes:
    def __init__(self) -> None:
        self._waiting: RoundRobin[asyncio.Future[None]] = RoundRobin()
        self._running: OpenConnections[asyncio.Task[Any]] = OpenConnections(MAX_HANDSHAKES)

    @asynccontextmanager
    async def turn(self, address: str) -> AsyncIterator[None]:
        """Wait for a turn, which ends with the block. Of more than MAX_HANDSHAKES at a time one is cancelled, by the rule
        of OpenConnections."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._begin)
        self._waiting.push(address, turn)
        await turn
        task = asyncio.current_task()
        assert task is not None, "called by a coroutine"
        excess = self._running.add(task, address)
        if excess is not None:
            excess.cancel()
        try:
            yield
        finally:
            self._running.discard(task)

    def _begin(self) -> None:
        begun = 0
        while self._waiting and begun < HANDSHAKES_PER_TURN:
            turn = self._waiting.pop()
            if not turn.done():  # its connection is closed
                turn.set_result(None)
                begun += 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._begin)


class Link(Protocol):
    address: str

    def dispatch(self, entries: int) -> tuple[int, bool]:
        """Dispatch up to so many entries. Returns their number, and whether more can be dispatched in the next turn."""


class Dispatching:
    """Links whose frames wait to be dispatched."""

    def __init__(self) -> None:
        self._waiting: RoundRobin[Link] = RoundRobin()
        self._left = ENTRIES_PER_TURN  # in this turn of the loop
        self._scheduled = False

    def push(self, link: Link) -> None:
        """Dispatch the link's frames, at once if the turn has room. Not called again before they are dispatched."""
        if self._left > 0 and not self._waiting:
            self._dispatch(link)
        else:
            self._waiting.push(link.address, link)
        self._schedule()

    def _dispatch(self, link: Link) -> None:
        taken, more = link.dispatch(min(self._left, ENTRIES_AT_ONCE))
        self._left -= max(1, taken)
        if more:
            self._waiting.push(link.address, link)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        self._left = ENTRIES_PER_TURN
        try:
            while self._waiting and self._left > 0:
                self._dispatch(self._waiting.pop())
        finally:  # an error of one link does not stop the others
            if self._waiting:
                self._schedule()
