"""What one attempt has produced so far, for whichever router stream reads it.

Tokens stay until the attempt is forgotten, so a stream that broke can be opened again from any position, and a
repeated Run gets its first answer again. The newest reader wins: an older one ends at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from cluster.protocol.times import BEAT_SECONDS
from wire import common_pb2

MAX_UNREAD_TOKENS = 256


class AttemptLog:
    """Events of one attempt, in order: tokens, then one end.

    `engine_step` returns the engine's step counter, or None while the engine hangs: then no beat is sent.
    """

    def __init__(self, engine_step: Callable[[], int | None]):
        self._engine_step = engine_step
        self._tokens: list[common_pb2.Token] = []
        self._end: common_pb2.AttemptEnd | None = None
        self._changed = asyncio.Event()
        self._reader = 0  # serial number of the newest reader
        self._readers_open = 0
        self._read = 0  # tokens that the newest reader has taken
        self._end_taken = False

    @property
    def ended(self) -> bool:
        return self._end is not None

    @property
    def end_taken(self) -> bool:
        """A reader has been given the end: nobody needs to come back."""
        return self._end_taken

    @property
    def has_reader(self) -> bool:
        return self._readers_open > 0

    @property
    def unread_tokens(self) -> int:
        return len(self._tokens) - self._read

    @property
    def tokens(self) -> list[common_pb2.Token]:
        return self._tokens

    def add(self, token: common_pb2.Token) -> None:
        self._tokens.append(token)
        self._changed.set()

    def end(self, end: common_pb2.AttemptEnd) -> None:
        """Only the first end counts: what came later could not know it was too late."""
        if self._end is None:
            self._end = end
            self._changed.set()

    async def read(
        self, from_position: int = 0, on_progress: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[common_pb2.AttemptEvent, None]:
        """Tokens from `from_position` on, then the end; a beat whenever 0.5 s pass in silence.

        `on_progress` is called after each batch that the reader took (to resume a paused request).
        """
        self._reader += 1
        serial = self._reader
        self._readers_open += 1
        self._changed.set()  # an older reader must notice that it is over
        self._read = cursor = 0
        try:
            while serial == self._reader:
                while cursor < len(self._tokens) and serial == self._reader:
                    token = self._tokens[cursor]
                    cursor += 1
                    if token.position >= from_position:
                        yield common_pb2.AttemptEvent(token=token)
                    self._read = cursor
                on_progress()
                if cursor < len(self._tokens):
                    continue
                if self._end is not None:
                    self._end_taken = True
                    yield common_pb2.AttemptEvent(end=self._end)
                    return
                self._changed.clear()
                if not await self._wait_for_change() and (step := self._engine_step()) is not None:
                    yield common_pb2.AttemptEvent(beat=common_pb2.Beat(engine_step=step))
        finally:
            self._readers_open -= 1

    async def _wait_for_change(self) -> bool:
        try:
            async with asyncio.timeout(BEAT_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True
