"""Reserve messages that wait for the decode worker's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cluster import errors
from wire import handoff_pb2


@dataclass(eq=False)
class _Waiting:
    answer: asyncio.Future[handoff_pb2.ReserveReply]
    aborted: handoff_pb2.Aborted | None = None  # in the message that accepted it


class Reservations:
    def __init__(self) -> None:
        self._waiting: dict[bytes, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def expect(self, transfer_id: bytes) -> Iterator[asyncio.Future[handoff_pb2.ReserveReply]]:
        """The answer of one hand-off, as long as it is waited for."""
        waiting = self._waiting[transfer_id] = _Waiting(asyncio.get_running_loop().create_future())
        try:
            yield waiting.answer
            if waiting.aborted is not None:
                raise errors.from_wire(waiting.aborted.error)
        finally:
            del self._waiting[transfer_id]

    def answered(self, reply: handoff_pb2.ReserveReply) -> None:
        waiting = self._waiting.get(reply.transfer_id)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_result(reply)

    def aborted(self, message: handoff_pb2.Aborted) -> None:
        if (waiting := self._waiting.get(message.transfer_id)) is not None:
            waiting.aborted = message

    def fail(self, error: errors.BatonError) -> None:
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
