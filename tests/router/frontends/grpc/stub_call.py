"""A call whose client reads when the test says so, and a dispatcher driven by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from router.dispatch.batch_queue import BatchQueue
from router.request.completion import Delta, Outcome
from tests.harness.waiting import turns
from wire import inference_pb2 as pb


class StubCall:
    """`read` lets the write that is under way end."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.opened = False  # the metadata was sent by itself
        self.failure: Exception | None = None
        self._writing: asyncio.Future[None] | None = None

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        assert not self.opened, "gRPC sends it once"
        self.opened = True

    async def write(self, message: bytes) -> None:
        assert self.opened, "its status could not follow an unread message"
        assert self._writing is None, "gRPC takes one message at a time"
        self.begun.append(message)
        self._writing = asyncio.get_running_loop().create_future()
        await self._writing
        if self.failure is not None:
            raise self.failure

    @property
    def writing(self) -> bool:
        return self._writing is not None

    async def read(self) -> None:
        assert self._writing is not None
        written, self._writing = self._writing, None
        written.set_result(None)
        await turns()

    async def read_all(self) -> None:
        while self.writing:
            await self.read()

    @property
    def responses(self) -> list[pb.GenerateResponse]:
        return [pb.GenerateResponse.FromString(one) for one in self.begun]

    @property
    def tokens(self) -> list[int]:
        return [token.position for one in self.responses for token in one.chunk.tokens]


class StubDispatcher:
    queue: BatchQueue[Delta]
    stopped = False

    def __init__(self) -> None:
        self.on_charged: Callable[[], None] = lambda: None
        self.worker_ids = ["p", "d"]
        self.outcome = Outcome(pb.Usage(prompt_tokens=2, completion_tokens=9), pb.Timings(attempts=1))

    def start(self, queue: BatchQueue[Delta]) -> None:
        self.queue = queue

    def stop(self) -> None:
        self.stopped = True

    def resume_ticket(self) -> bytes:
        return b"ticket"


def context(call: StubCall) -> Any:
    return call
