"""A connection on which requests wait behind the one that runs: its socket is not read meanwhile.

So neither the client's end nor its reset arrives, and the request that runs would outlive its client. The kernel is asked
for them from time to time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sized

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.frontends.http.connection.acknowledged import client_has_ended

POLL_SECONDS = 0.5


class PipelineFlow(FlowControl):
    """Does not read on while requests wait: each end of an answer would read the next ones into memory."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized):
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if not self._pipeline:
            super().resume_reading()


class EndWatch:
    """Calls `ended` every POLL_SECONDS in which requests wait and the client has ended."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized, ended: Callable[[], None]):
        self._transport = transport
        self._pipeline = pipeline
        self._ended = ended
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Watch, if requests wait, until none does."""
        if self._pipeline and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_SECONDS, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._transport.is_closing():
            return
        if self._pipeline and client_has_ended(self._transport):
            self._ended()
        self.start()


def is_read_only(cycle: RequestResponseCycle) -> bool:
    """Whether it is a request, not answered yet, that may go on once its client has ended."""
    return cycle.scope["method"] in ("GET", "HEAD") and not cycle.more_body and not cycle.response_complete
