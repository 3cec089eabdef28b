"""Reads the deltas of a request's dispatchers, and writes them to its connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import CancelledError
from router.dispatch.batch_queue import BatchQueue
from router.dispatch.dispatcher import PIECE_SECONDS, RequestDispatcher
from router.request.completion import Delta

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class AnswerReader:
    """Starts the dispatchers of one answer and reads their deltas, in the order in which they arrive."""

    def __init__(self, dispatchers: Sequence[RequestDispatcher], request: Request):
        self.dispatchers = dispatchers
        self._deltas: BatchQueue[Delta] = BatchQueue(len(dispatchers), PIECE_SECONDS)
        for dispatcher in dispatchers:
            dispatcher.start(self._deltas)
        # Writes to a client that has disconnected are dropped silently: only `receive` reports it.
        self._watch = asyncio.get_running_loop().create_task(self._until_disconnected(request))

    async def take(self) -> list[Delta]:
        """The deltas that arrived since the last call; none at the end.

        Raises the first BatonError of a dispatcher, or CancelledError (cluster.errors) if the client disconnects.
        """
        return await self._deltas.take()

    def stop(self) -> None:
        """Cancel the dispatchers that have not finished."""
        self._watch.cancel()
        for dispatcher in self.dispatchers:
            dispatcher.stop()

    async def _until_disconnected(self, request: Request) -> None:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                self._deltas.discard(CancelledError("the client disconnected"))
                return


class EventStream(Response):
    """Server-sent events, sent as they are made."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], headers: Mapping[str, str], release: Callable[[], None]):
        """`release` is called after the last write, also if the stream fails."""
        super().__init__(headers={**headers, **_STREAM_HEADERS})
        del self.headers["content-length"]
        self._events = events
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for piece in self._events:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._release()
