"""A process's link to its parent: it reports, asks for the router's metrics, and answers when it is asked for its own.

A thread answers, so that a process whose event loop is busy still shows its metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from cluster.errors import UnavailableError
from cluster.telemetry.exposition import OPEN_METRICS, accepts_open_metrics
from router.processes.frames import Message, encode, receive

log = logging.getLogger(__name__)
ANSWER_SECONDS = 5.0


class ParentLink:
    """`start` on the event loop of the process."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._sending = threading.Lock()
        self._asked: dict[str, asyncio.Future[Message]] = {}  # by format
        self._loop: asyncio.AbstractEventLoop | None = None
        self._snapshot: Callable[[], Any] = list
        self.drain_wanted = asyncio.Event()  # the router leaves, or the link has ended
        self.stop_wanted = asyncio.Event()  # every process has drained, or the link has ended
        self.ended = asyncio.Event()  # the parent is gone

    def start(self, snapshot: Callable[[], Any]) -> None:
        """`snapshot` returns this process's metrics (router/processes/snapshots.py); it runs on the link's thread."""
        self._snapshot = snapshot
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    async def report(self, message: Message) -> None:
        await asyncio.to_thread(self._send, message)

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """The metrics of all processes, and their content type. Raises UnavailableError."""
        accept = OPEN_METRICS if accepts_open_metrics(accept) else ""  # two answers, however clients ask
        waiting = self._asked.get(accept)
        if waiting is None or waiting.done():
            waiting = self._asked[accept] = asyncio.get_running_loop().create_future()
            await self.report({"ask": "metrics", "accept": accept})
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await asyncio.shield(waiting)
        except TimeoutError:
            self._asked.pop(accept, None)
            late = f"the router's parent process has not answered within {ANSWER_SECONDS:g} s"
            raise UnavailableError(late, retry_after_seconds=1.0) from None
        return answer["body"].encode(), str(answer["type"])

    def _send(self, message: Message) -> None:
        # An error: the parent is gone, and its death ends this process.
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(encode(message))

    def _read(self) -> None:
        loop = self._loop
        assert loop is not None, "started"
        try:
            while (message := receive(self._socket)) is not None:
                self._received(loop, message)
        except Exception:
            log.exception("the link to this router's parent has failed")
        finally:  # the parent is gone, or reading has failed: without the link this process cannot go on
            for event in (self.ended, self.drain_wanted, self.stop_wanted):
                _call(loop, event.set)

    def _received(self, loop: asyncio.AbstractEventLoop, message: Message) -> None:
        if message["do"] == "scrape":
            self._send({"scraped": message["number"], "metrics": self._taken()})
        elif message["do"] == "drain":
            _call(loop, self.drain_wanted.set)
        elif message["do"] == "stop":
            _call(loop, self.stop_wanted.set)
        elif message["do"] == "metrics":
            _call(loop, self._answered, message)

    def _taken(self) -> Any:
        """None: a collector has failed, for example because what it counts changed meanwhile."""
        try:
            return self._snapshot()
        except Exception:
            log.exception("this process's metrics cannot be read")
            return None

    def _answered(self, message: Message) -> None:
        waiting = self._asked.pop(message["accept"], None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)


def _call(loop: asyncio.AbstractEventLoop, call: Callable[..., Any], *arguments: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *arguments)
