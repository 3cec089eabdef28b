"""A router's end of links for tests that call workers themselves: what came of each attempt, token by token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.errors import BatonError
from cluster.membership.types import WorkerInfo
from cluster.protocol.link import window_of
from router.link.handle import LinkHandle
from router.link.links import Links
from router.link.token import Token
from wire import common_pb2

T = TypeVar("T")


MAX_CHOICES = 1024  # more than any worker accepts: a test may ask for billions


@dataclass(eq=False)
class Reading:
    """One attempt at one worker, read as a router does: exactly the next position of each choice."""

    transfer_id: bytes
    position: int
    choices: int = 1
    first_choice: int = 0
    reads: int | None = None  # so many tokens of each choice, then it grants nothing until `read_on`
    taken_in: bool = False  # the worker has shown that it has the attempt
    tokens: dict[int, list[Token]] = field(default_factory=dict)  # by choice
    end: common_pb2.AttemptEnd | None = None
    error: BatonError | None = None
    handle: LinkHandle | None = None

    def __post_init__(self) -> None:
        self.tokens = {self.first_choice + i: [] for i in range(self.choices)}
        self.came = asyncio.Event()  # its first token
        self.over = asyncio.Event()

    @property
    def reference(self) -> common_pb2.HandleRef:
        assert self.handle is not None, "LinkClient.read opens it"
        return self.handle.reference

    def positions(self) -> list[int]:
        return [self.position + len(tokens) for tokens in self.tokens.values()]

    def limits(self) -> list[int]:
        return [self._limit(tokens) for tokens in self.tokens.values()]

    def repeat_credit(self) -> None:
        assert self.handle is not None, "LinkClient.read opens it"
        for choice, tokens in self.tokens.items():
            self.handle.credit(choice, self._limit(tokens))

    def _limit(self, tokens: list[Token]) -> int:
        read = len(tokens) if self.reads is None else min(len(tokens), self.reads)
        return self.position + read + window_of(len(self.tokens))

    def read_on(self) -> None:
        self.reads = None
        for choice, tokens in self.tokens.items():
            if self.handle is not None:
                self.handle.credit(choice, self._limit(tokens))

    def token(self, token: Token) -> None:
        self.taken_in = True
        tokens = self.tokens.setdefault(token.choice, [])  # fuzzed requests ask for other choices
        wanted = self.position + len(tokens)
        assert token.position <= wanted, f"position {token.position} came, {wanted} was next"
        if token.position == wanted:
            tokens.append(token)
            self.came.set()
            if self.handle is not None:
                self.handle.credit(token.choice, self._limit(tokens))

    def ended(self, end: common_pb2.AttemptEnd) -> None:
        self.end = end
        self.over.set()

    def lost(self, error: BatonError) -> None:
        self.error = error
        self.over.set()

    async def wait(self, seconds: float) -> common_pb2.AttemptEnd:
        """The end. Raises what lost it, or TimeoutError."""
        async with asyncio.timeout(seconds):
            await self.over.wait()
        if self.error is not None:
            raise self.error
        assert self.end is not None
        return self.end


class LinkClient:
    def __init__(self) -> None:
        self.links = Links("test-client")

    def read(
        self,
        worker: WorkerInfo,
        transfer_id: bytes,
        spec: common_pb2.GenerateSpec,
        reads: int | None = None,
    ) -> Reading:
        """An attempt that is dispatched with `reading.reference`."""
        position = (len(spec.prompt_tokens) + len(spec.output_tokens)) // 4
        choices = min(max(1, spec.n), MAX_CHOICES)
        reading = Reading(transfer_id, position, choices, spec.first_choice, reads)
        reading.handle = self.links.open(worker, reading)
        return reading

    async def close(self) -> None:
        await self.links.close()


class BlockingLinkClient:
    """The same for tests without an event loop: links live on a thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = self.run(self._make())

    async def _make(self) -> LinkClient:
        return LinkClient()

    def run(self, coroutine: Coroutine[Any, Any, T], seconds: float = 60.0) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(seconds)

    def read(
        self,
        worker: WorkerInfo,
        transfer_id: bytes,
        spec: common_pb2.GenerateSpec,
        reads: int | None = None,
    ) -> Reading:
        async def go() -> Reading:
            return self._client.read(worker, transfer_id, spec, reads)

        return self.run(go())

    def read_on(self, reading: Reading) -> None:
        async def go() -> None:
            reading.read_on()

        self.run(go())

    def forget(self, reading: Reading) -> None:
        """Read nothing more of it; its link closes if nothing else is read there."""

        async def go() -> None:
            if reading.handle is not None:
                reading.handle.close()
            self._client.links.keep_only([])

        self.run(go())

    def end_of(self, reading: Reading, seconds: float) -> common_pb2.AttemptEnd:
        """Raises BatonError if it was lost, TimeoutError."""
        return self.run(reading.wait(seconds), seconds + 10)

    def close(self) -> None:
        self.run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@contextmanager
def blocking_link_client() -> Iterator[BlockingLinkClient]:
    client = BlockingLinkClient()
    try:
        yield client
    finally:
        client.close()
