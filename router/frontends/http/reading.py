"""From requests' lives to a connection: what came at once goes out at once; a client that has gone ends it all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.errors import CancelledError
from router.dispatch.bounded_queue import BoundedQueue
from router.dispatch.dispatcher import MAX_UNREAD_DELTAS, PIECE_SECONDS, RequestDispatcher
from router.request.completion import Delta

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class ScrapedMetric:
    """Starts the lives of one answer and reads what they say, all together, in the order in which it came."""

    def __init__(self, dispatchers: Sequence[RequestDispatcher], request: Request):
        self.dispatchers = dispatchers
        self._deltas: BoundedQueue[Delta] = BoundedQueue(MAX_UNREAD_DELTAS, len(dispatchers), PIECE_SECONDS)
        for dispatcher in dispatchers:
            dispatcher.start(self._deltas)
        # The server drops what it is told to send to a client that has gone: only asking tells.
        self._watch = asyncio.get_running_loop().create_task(self._until_disconnected(request))

    async def take(self) -> list[Delta]:
        """Empty at the end. Raises the first life's BatonError; CancelledError (ours) once the client has gone."""
        return await self._deltas.take()

    def stop(self) -> None:
        """Ends what is still going on."""
        self._watch.cancel()
        for dispatcher in self.dispatchers:
            dispatcher.stop()

    async def _until_disconnected(self, request: Request) -> None:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                self._deltas.discard(CancelledError("the client has gone"))
                return


class EventStream(Response):
    """Server-sent events, sent as they come."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], headers: Mapping[str, str], release: Callable[[], None]):
        """`release` is called once nothing more will be sent, whatever the reason."""
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
