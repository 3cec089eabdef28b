"""A process of a router, from its start to its end, as the parent sees it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cluster.config.router import RouterConfig
from router.processes import frames, snapshots
from router.processes.frames import Message
from router.processes.memory import SharedMemory
from router.processes.snapshots import Snapshot

log = logging.getLogger(__name__)
Encoded = Callable[[str], Awaitable[tuple[bytes, str]]]


class ChildProcess:
    """`start`, then `wait` until it has ended."""

    def __init__(self, index: int, config: RouterConfig, encoded: Encoded):
        """`encoded`: the metrics of the whole router, which clients may request from this process."""
        self.index = index
        self.began = time.monotonic()
        self._config = config
        self._encoded = encoded
        self.started: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.drained = asyncio.Event()  # or ended
        self._numbers = itertools.count(1)
        self._scraped: tuple[int, asyncio.Future[Snapshot | None]] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def serves(self) -> bool:
        return self.started.done() and not self.started.cancelled()

    async def start(self, name: str, memory: SharedMemory, http: Sequence[socket.socket]) -> None:
        """`http`: sockets that listen on the HTTP port. Raises OSError, for example where there are too many processes."""
        ours, theirs = socket.socketpair()
        listeners = [one.fileno() for one in http]
        with theirs:
            setup = {
                "name": name,
                "index": self.index,
                "parent": os.getpid(),
                "config": self._config.model_dump(mode="json"),
                "tenants": memory.tenants,
                "memory": memory.fd,
                "link": theirs.fileno(),
                "http": listeners,
            }
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "router.processes.child"),
                    stdin=asyncio.subprocess.PIPE,
                    pass_fds=(memory.fd, theirs.fileno(), *listeners),
                )
            except OSError:
                ours.close()
                raise
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._spawn(self._read(reader))
        stdin = self._process.stdin
        assert stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError):  # it has ended already
            stdin.write(json.dumps(setup).encode())
            await stdin.drain()
        stdin.close()

    async def wait(self) -> int:
        """Wait for its end and return its exit code, as subprocess does."""
        assert self._process is not None, "started"
        code = await self._process.wait()
        if self._writer is not None:
            self._writer.close()
        for task in self._tasks:
            task.cancel()
        if not self.started.done():
            self.started.cancel()
        self.drained.set()
        return code

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None and self._process.returncode is None:
                self._process.send_signal(number)

    def send(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frames.encode(message))

    async def scrape(self, seconds: float) -> Snapshot | None:
        """None: it does not answer in time. One that is stopped is asked once, not again and again."""
        if not self.serves:
            return None
        if self._scraped is None or self._scraped[1].done():
            number = next(self._numbers)
            self._scraped = number, asyncio.get_running_loop().create_future()
            self.send({"do": "scrape", "number": number})
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(self._scraped[1])
        except TimeoutError:
            return None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (message := await frames.read(reader)) is not None:
            try:
                self._received(message)
            except Exception:  # one message is lost, not those that follow
                log.exception("a message of process %d cannot be read", self.index)
                self._scrape_answered(None)
        self._scrape_answered(None)

    def _received(self, message: Message) -> None:
        if "started" in message and not self.started.done():
            self.started.set_result(message["started"])
        elif "drained" in message:
            self.drained.set()
        elif "scraped" in message:
            if self._scraped is not None and self._scraped[0] == message["scraped"]:
                metrics = message["metrics"]
                self._scrape_answered(None if metrics is None else snapshots.decode(metrics))
        elif "ask" in message:
            self._spawn(self._answer(str(message["accept"])))

    def _scrape_answered(self, snapshot: Snapshot | None) -> None:
        if self._scraped is not None and not self._scraped[1].done():
            self._scraped[1].set_result(snapshot)

    async def _answer(self, accept: str) -> None:
        body, content_type = await self._encoded(accept)
        self.send({"do": "metrics", "accept": accept, "body": body.decode(), "type": content_type})

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
