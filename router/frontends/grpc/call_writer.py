"""Writes the messages of one call, from callbacks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from router.frontends.grpc.gate import Context
from router.frontends.grpc.write_deadline import WriteDeadline


class Watcher(Protocol):
    def resumed(self) -> None:
        """Every message is written."""

    def discard(self, error: BaseException) -> None:
        """A write has failed: nothing more is written."""


class CallWriter:
    """Writes messages in order, one at a time: gRPC takes the next one when the last one has left the call's own buffer.
    It is `paused` meanwhile, so what arrives then becomes one message.

    grpc.aio's write is a coroutine. A task for it would cost a wake-up per message, so it is run by hand: it waits once,
    for a future that gRPC completes.

    The call's metadata goes before the first message by itself. If they went together and the message were never read,
    the status would repeat the metadata, which gRPC refuses: the call would stay open without a status.
    """

    def __init__(self, context: Context, seconds: float):
        """The call fails with CancelledError (cluster.errors) when its client reads nothing for `seconds`."""
        self._context = context
        self._messages: deque[bytes] = deque()
        self._write: Coroutine[Any, Any, None] | None = None
        self.opening: asyncio.Future[None] | None = None  # the metadata is being written, or is when done
        self._failure: BaseException | None = None
        self._watcher: Watcher | None = None
        self._written: asyncio.Future[None] | None = None  # waits for all messages
        self._deadline = WriteDeadline(seconds, self._expired)

    @property
    def paused(self) -> bool:
        return self._write is not None

    def watch(self, watcher: Watcher) -> None:
        self._watcher = watcher
        if self._failure is not None:
            watcher.discard(self._failure)

    def unwatch(self) -> None:
        self._watcher = None

    def write(self, messages: Iterable[bytes]) -> None:
        if self._failure is None:
            self._messages.extend(messages)
            if self._write is None:
                self._next()

    async def written(self) -> None:
        """Return once every message is written. Raises what made a write fail."""
        if self._failure is None and self._write is not None:
            self._written = asyncio.get_running_loop().create_future()
            try:
                await self._written
            finally:
                self._written = None
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Write nothing more. What gRPC has of the last message is its own."""
        self._deadline.close()
        self._messages.clear()
        self._failure = self._failure or asyncio.CancelledError()

    def _next(self) -> None:
        """Begin the next write, unless there is none."""
        while self._messages and self._write is None:
            if self.opening is not None:
                self._write = self._context.write(self._messages.popleft())
            else:
                self.opening = asyncio.get_running_loop().create_future()
                self._write = self._context.send_initial_metadata(())
            self._deadline.begin()
            self._run()

    def _run(self) -> None:
        """Run the write until it waits or ends."""
        assert self._write is not None
        try:
            waited_for = self._write.send(None)
        except StopIteration:
            self._ended()
        except BaseException as error:  # as a task keeps it
            self._ended()
            self._fail(error)
        else:
            waited_for.add_done_callback(self._continue)

    def _ended(self) -> None:
        self._write = None
        self._deadline.end()
        if self.opening is not None and not self.opening.done():
            self.opening.set_result(None)

    def _continue(self, _: asyncio.Future[Any]) -> None:
        self._run()
        self._next()
        if self._write is None:
            if self._written is not None and not self._written.done():
                self._written.set_result(None)
            elif self._watcher is not None and self._failure is None:
                self._watcher.resumed()

    def _expired(self) -> None:
        self._fail(self._deadline.error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._messages.clear()
        if self._watcher is not None:
            self._watcher.discard(error)
        if self._written is not None and not self._written.done():
            self._written.set_result(None)
