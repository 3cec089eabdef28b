"""Passes the deltas of a request's dispatchers on to the writer of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from cluster.errors import CancelledError
from router.dispatch.batch_queue import BatchQueue
from router.dispatch.dispatcher import PIECE_SECONDS, RequestDispatcher
from router.dispatch.turn import Turn
from router.request.completion import Delta

ENTRIES_AT_ONCE = 512  # tokens and alternatives written in one turn of the event loop: about 1 ms
EMBEDDING_BYTES = 256  # of a vector, which take as long as an entry


class Outlet(Protocol):
    """Where an answer is written: an HTTP exchange, or a gRPC call."""

    @property
    def paused(self) -> bool:
        """Whether the outlet accepts no output now: it is kept, and written in one piece once the outlet accepts more."""

    def watch(self, watcher: AnswerQueue) -> None:
        """Call its `resumed` once the outlet is no longer paused; `disconnected` or `discard` where it has ended."""

    def unwatch(self) -> None: ...


class AnswerQueue(BatchQueue[Delta]):
    """Passes the deltas that arrive in one turn of the event loop, within the pace, or while the outlet is paused, on in
    one call. No task is woken but for the last ones.

    It is not drained while a stream's client does not read, so that its dispatchers grant their workers no credit.
    """

    def __init__(
        self,
        outlet: Outlet,
        write: Callable[[list[Delta]], None],
        dispatchers: int,
        turn: Turn,
        tenant: str = "",
        *,
        streamed: bool,
    ):
        super().__init__(dispatchers, PIECE_SECONDS)
        self._outlet = outlet
        self._write = write
        self._turn, self._tenant = turn, tenant
        self._streamed = streamed
        self._due = False  # _pass_on will be called, at the end of this turn or by the timer
        self._timer: asyncio.TimerHandle | None = None  # of _pass_on, for the pace
        self._over = self._loop.create_future()
        self._closed = False
        self._may_be_held_up = True  # asked again before the next piece: writing alone pauses an outlet

    @property
    def _held_up(self) -> bool:
        return self._streamed and self._outlet.paused and self._error is None

    async def pass_all(
        self, dispatchers: Sequence[RequestDispatcher], next_turn: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Start the dispatchers, and return once all their deltas are written. `next_turn` is awaited before each but the
        first.

        Raises the first BatonError of one, or CancelledError (cluster.errors) if the client disconnects. Those that have
        not finished are then cancelled.
        """
        try:
            for number, one in enumerate(dispatchers):
                if number and next_turn is not None:
                    await next_turn()
                if self._error is not None:
                    break
                one.start(self)
            self._outlet.watch(self)
            if len(dispatchers) > 1:
                self.resumed()  # the outlet may have been while this did not watch it
            await self._over
            while deltas := await self.take():
                while len(deltas) > (count := count_at_once(deltas)):
                    self._write(deltas[:count])
                    del deltas[:count]
                    await asyncio.sleep(0)
                self._write(deltas)
        finally:
            self._closed = True
            self._error = None  # its traceback refers to all that the request has
            self._outlet.unwatch()
            if self._timer is not None:
                self._timer.cancel()
            for one in dispatchers:
                one.stop()

    def fail(self, error: BaseException) -> None:
        if not self._closed:
            super().fail(error)

    def disconnected(self) -> None:
        self.discard(CancelledError("the client disconnected"))

    def resumed(self) -> None:
        if self._items or self._when_drained or self._error is not None or self._producers <= 0:
            self._wake()

    def add(self, item: Delta) -> None:
        self._items.append(item)
        if not self._due:
            self._due = True
            self._turn.add(self._pass_on, self._tenant)

    def _wake(self) -> None:
        if self._timer is not None and (self._error is not None or self._producers <= 0):
            self._timer.cancel()  # the end does not wait for the pace
            self._add_to_turn()
        elif not self._due:
            self._add_to_turn()

    def _add_to_turn(self) -> None:
        self._due, self._timer = True, None
        self._turn.add(self._pass_on, self._tenant)

    def _pass_on(self) -> None:
        if self._may_be_held_up:
            self._may_be_held_up = self._held_up
        if self._closed or self._may_be_held_up:
            self._due = False
            return
        early = self._early()
        if early > 0.0:
            self._timer = self._loop.call_later(early, self._add_to_turn)
            return
        self._due = False
        if self._items and self._error is None:
            items, self._items = self._items, []
            if len(items) > 1 and (count := count_at_once(items)) < len(items):
                self._items = items[count:]
                del items[count:]
            try:
                self._write(items)
            except Exception as error:
                self.discard(error)
                return
            self._may_be_held_up = self._streamed and self._outlet.paused
        if self._error is not None or (self._producers <= 0 and not self._items):
            if not self._over.done():
                self._over.set_result(None)
        elif self._items and not self._may_be_held_up:
            self._taken = 0.0  # the pace is that of whole batches: the rest follows in the next turn
            self._add_to_turn()
        elif self._when_drained and not self._may_be_held_up:
            self._drained()


def count_at_once(deltas: Sequence[Delta]) -> int:
    """How many of the first deltas are written in one turn."""
    left = ENTRIES_AT_ONCE
    for count, delta in enumerate(deltas):
        if left <= 0:
            return count
        left -= 1 + sum(len(token.top_logprobs) for token in delta.tokens)
        left -= sum(
            1 + len(token.top_logprobs) + len(token.embedding) // EMBEDDING_BYTES for token in delta.prompt
        )
    return len(deltas)
