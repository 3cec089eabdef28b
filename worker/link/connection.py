"""The connection of one link: its session's bytes, beats and time limits."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from cluster.errors import BatonError
from cluster.faults.points import Act, FaultPoint
from cluster.protocol.link import (
    AGE_SPREAD,
    ATTACH_SECONDS,
    HELLO_SECONDS,
    MAX_AGE_SECONDS,
    MOVE_SECONDS,
)
from cluster.protocol.times import BEAT_SECONDS, LOST_SECONDS
from cluster.security.peer_names import ROUTER_NAME, names_of
from cluster.sockets import network_of, readable
from worker.link.session import Session, State
from worker.link.turns import Dispatching, Handshakes

log = logging.getLogger(__name__)
CLOSE_SECONDS = 0.25  # for what was written last to leave
HANDSHAKE_SECONDS = 10.0
SEND_BUFFER_BYTES = 256 << 10  # of the kernel: by default it keeps megabytes for a router that does not read


class ConnectionOwner(Protocol):
    """The listener that has accepted a connection: worker.link.listener.LinkListener."""

    handshakes: Handshakes
    dispatching: Dispatching

    def forget(self, connection: Connection) -> None:
        """The connection is gone."""

    def settled(self, connection: Connection) -> None:
        """`Connection.settled` has changed."""


class Connection(asyncio.Protocol):
    """Implements worker.link.session.FrameTransport. A router that sends no whole frame for LOST_SECONDS, or does not read
    its answers for as long, is cut: its handles detach."""

    def __init__(
        self,
        make_session: Callable[[Connection], Session],
        owner: ConnectionOwner,
        accepted: socket.socket,
        context: ssl.SSLContext | None,
        at_frame: FaultPoint,
    ):
        self._loop = asyncio.get_running_loop()
        self._session = make_session(self)
        self._owner = owner
        self.address = network_of(accepted)
        self._was_settled = False
        self._at_frame = at_frame
        self._tls = context is not None
        self._transport: Any = None  # uvloop's TLS transport is no asyncio.Transport
        self._blocked = False  # a frame is unwritten
        self._scheduled = False
        self._reading = False  # frames are dispatched in the next turn as well
        self._paused = False  # nothing is read from the socket
        self._made = self._received_at = self._due = self._loop.time()
        self._leave_at = self._received_at + MAX_AGE_SECONDS * random.uniform(1 - AGE_SPREAD, 1 + AGE_SPREAD)
        self._cut_at = self._leave_at + MOVE_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._opening = self._loop.create_task(self._open(accepted, context))
        self._opening.add_done_callback(partial(self._opened, accepted))

    # --- asyncio.Protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self._tls and ROUTER_NAME not in names_of(transport):
            log.warning("a link was refused: its certificate is not one of %s", ROUTER_NAME)
            self._transport.abort()
            return
        # One frame at a time: the logs are the buffer. Not 0: uvloop with TLS takes no unwritten bytes for as many as 0,
        # and would write the next frame only after the router has sent something.
        self._transport.set_write_buffer_limits(high=1)
        self._made = self._received_at = self._loop.time()
        self._tick_later()

    def data_received(self, data: bytes) -> None:
        try:
            if self._session.received(data):
                self._received_at = self._loop.time()
                self._read()
        except BatonError as error:
            self._refuse(error)

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        self.schedule()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._owner.forget(self)
        self._session.closed()

    # --- worker.link.session.FrameTransport ----------------------------------------------------------------

    def write(self, frame: bytes) -> None:
        fault = self._at_frame(self._session.router_id)
        if fault is None:
            self._transport.write(frame)
            return
        self._transport.write(frame[: len(frame) // 2] if fault.act is Act.HALF else frame)
        if fault.act in (Act.HALF, Act.RESET):
            self._transport.abort()

    def schedule(self) -> None:
        if not self._scheduled:
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

    @property
    def settled(self) -> bool:
        """It is its router's link. Others make room for new connections."""
        return self._session.state is State.UP

    def end(self) -> None:
        if self._transport is not None:
            self._session.end()
        else:
            self._opening.cancel()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        else:
            self._opening.cancel()

    async def _open(self, accepted: socket.socket, context: ssl.SSLContext | None) -> None:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if context is None:
            await self._loop.connect_accepted_socket(lambda: self, accepted)
            return
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await readable(accepted)  # a silent peer takes no turn
            async with self._owner.handshakes.turn(self.address):
                await self._loop.connect_accepted_socket(
                    lambda: self, accepted, ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS
                )

    def _opened(self, accepted: socket.socket, opening: asyncio.Task[None]) -> None:
        error = None if opening.cancelled() else opening.exception()
        if error is None and not opening.cancelled():
            return
        if isinstance(error, OSError):  # TLS errors and time-outs among them
            log.debug("the handshake of a link failed: %s", error)
        elif error is not None:
            log.error("a link was not accepted", exc_info=error)
        accepted.close()
        self._owner.forget(self)

    # -------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Dispatch what has come, over several turns of the loop if it is much. Nothing more is taken in meanwhile."""
        if not self._reading:
            self._reading = True
            self._owner.dispatching.push(self)
        self._pause_or_resume()

    def dispatch(self, entries: int) -> tuple[int, bool]:
        """Dispatch up to so many entries of frames. Returns their number, and whether more can be dispatched."""
        self._reading = False
        if self._session.state is State.ENDED:
            return 0, False
        self._received_at = self._loop.time()
        try:
            self._reading = self._session.read(entries)
        except BatonError as error:
            self._refuse(error)
            return entries, False
        self._pause_or_resume()
        self._report_settled()
        return self._session.taken, self._reading

    def _pause_or_resume(self) -> None:
        if self._session.unread != self._paused and not self._transport.is_closing():
            self._paused = self._session.unread
            self._transport.pause_reading() if self._paused else self._transport.resume_reading()

    def _report_settled(self) -> None:
        if self.settled != self._was_settled:
            self._was_settled = self.settled
            self._owner.settled(self)

    def _refuse(self, error: BatonError) -> None:
        # Before the greeting the peer may be anything: a line for each would fill the log.
        level = logging.DEBUG if self._session.state is State.HELLO else logging.WARNING
        log.log(level, "link of router %r closed: %s", self._session.router_id, error)
        self._session.end()
        self._transport.abort()

    def _flush(self) -> None:
        self._scheduled = False
        if not self._blocked:
            self._session.flush()
            if self._paused and not self._reading:  # answers have left: there is room for more
                self._read()
        self._report_settled()

    def _tick_later(self) -> None:
        self._due = self._loop.time() + BEAT_SECONDS
        self._timer = self._loop.call_later(BEAT_SECONDS, self._tick)

    def _tick(self) -> None:
        now = self._loop.time()
        late = now - self._due
        if late > 1.0:  # this process was stopped: what the router has sent lies unread
            self._received_at = now
            self._made += late
        if now > self._cut_at or self._overdue(now):
            self._transport.abort()
            return
        if self._session.state is State.MOVED:
            self.leave_soon()
        if now > self._leave_at:
            self._leave_at = self._cut_at
            self._session.go_away()
        self._session.beat()
        self._tick_later()

    def _overdue(self, now: float) -> bool:
        """Whether the router is silent or too slow. Bytes alone do not count: a greeting, or a list of handles, may go on
        without end."""
        if self._session.state is State.HELLO:
            return now - self._made > HELLO_SECONDS
        if self._session.state is State.ATTACHING and now - self._made > ATTACH_SECONDS:
            return True
        return now - self._received_at > LOST_SECONDS
