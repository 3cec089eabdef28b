"""The connection of one link: its session's bytes, beats and time limits."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from cluster.errors import BatonError
from cluster.faults.points import Act, FaultPoint
from cluster.protocol.link import AGE_SPREAD, HELLO_SECONDS, MAX_AGE_SECONDS, MOVE_SECONDS
from cluster.protocol.times import BEAT_SECONDS, LOST_SECONDS
from cluster.security.tls import ROUTER_NAME, names_of
from worker.link.session import Session, State

log = logging.getLogger(__name__)
CLOSE_SECONDS = 0.25  # for what was written last to leave


class Connection(asyncio.Protocol):
    """Implements worker.link.session.Wire. A router that sends nothing for LOST_SECONDS is cut: its handles detach."""

    def __init__(
        self,
        make_session: Callable[[Connection], Session],
        gone: Callable[[Connection], None],
        at_frame: FaultPoint,
        *,
        tls: bool,
    ):
        self._loop = asyncio.get_running_loop()
        self._session = make_session(self)
        self._gone = gone
        self._at_frame = at_frame
        self._tls = tls
        self._transport: Any = None  # uvloop's TLS transport is no asyncio.Transport
        self._blocked = False  # a frame is unwritten
        self._scheduled = False
        self._heard = self._due = self._loop.time()
        self._leave_at = self._heard + MAX_AGE_SECONDS * random.uniform(1 - AGE_SPREAD, 1 + AGE_SPREAD)
        self._cut_at = self._leave_at + MOVE_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self.opening: asyncio.Task[None] | None = None

    # --- asyncio.Protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._tls and ROUTER_NAME not in names_of(transport):
            log.warning("a link was refused: its certificate is not one of %s", ROUTER_NAME)
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=0)  # one frame at a time: the logs are the buffer
        self._heard = self._loop.time()
        self._tick_later()

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        try:
            self._session.received(data)
        except BatonError as error:
            log.warning("link of router %r closed: %s", self._session.router_id, error)
            self._transport.abort()

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        self.schedule()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._gone(self)
        self._session.closed()

    # --- worker.link.session.Wire --------------------------------------------------------------------------

    def write(self, frame: bytes) -> None:
        fault = self._at_frame(self._session.router_id)
        if fault is None:
            self._transport.write(frame)
            return
        self._transport.write(frame[: len(frame) // 2] if fault.act is Act.HALF else frame)
        if fault.act in (Act.HALF, Act.RESET):
            self._transport.abort()

    def schedule(self) -> None:
        if not self._scheduled and not self._blocked:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._transport.close()
        self._loop.call_later(CLOSE_SECONDS, self._transport.abort)

    # --- the listener --------------------------------------------------------------------------------------

    def leave_soon(self) -> None:
        """Ask the router for another link; this one is cut MOVE_SECONDS later."""
        now = self._loop.time()
        self._leave_at = min(self._leave_at, now)
        self._cut_at = min(self._cut_at, now + MOVE_SECONDS)

    def end(self) -> None:
        if self._transport is not None:
            self._session.end()
        elif self.opening is not None:
            self.opening.cancel()

    # -------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        self._scheduled = False
        if not self._blocked:
            self._session.flush()

    def _tick_later(self) -> None:
        self._due = self._loop.time() + BEAT_SECONDS
        self._timer = self._loop.call_later(BEAT_SECONDS, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        if now - self._due > 1.0:  # this process was stopped: what the router has sent lies unread
            self._heard = now
        silent = HELLO_SECONDS if self._session.state is State.HELLO else LOST_SECONDS
        if now - self._heard > silent or now > self._cut_at:
            self._transport.abort()
            return
        if now > self._leave_at:
            self._leave_at = self._cut_at
            self._session.go_away()
        self._session.beat()
        self._tick_later()
