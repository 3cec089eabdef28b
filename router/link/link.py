"""The link to one worker: opened, kept, opened again after a break, moved to a new connection, given up.

Its states are in router/link/state.py, the rules of both sides in docs/link.md.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import suppress

from cluster.errors import BatonError, InternalError, PeerLostError
from cluster.faults.points import Act
from cluster.membership.types import WorkerInfo
from cluster.protocol.link import MOVE_SECONDS, RETRY_SECONDS
from cluster.security.tls import Peers
from cluster.state_machine import StateMachine
from router.link.connection import ENTRIES_PER_TURN, Connection
from router.link.handle import LinkHandle, Reader
from router.link.handles import Handles
from router.link.identity import RouterIdentity
from router.link.opener import CONNECT_SECONDS, Opener
from router.link.outgoing import Outgoing, attach_frames
from router.link.state import TRANSITIONS, LinkState
from wire import link_pb2

log = logging.getLogger(__name__)
LOST_PAUSE_SECONDS = 1.0  # between attempts at a lost worker
MALFORMED_SECONDS = 60.0  # a worker that breaks the protocol twice within this time is lost
STEADY_SECONDS = 1.0  # a link that breaks earlier is tried again with longer pauses
MOVE_PAUSE_SECONDS = (
    1.0  # between attempts to move, and between moves: a worker asks for them, each has a descriptor
)
MOVED_SECONDS = 0.5  # of an attempt to move whose handles wait for it at the worker, for DETACH_SECONDS


class WorkerLink:
    """The link to one epoch of a worker. `open` an attempt's handle at any time: it attaches once the link is up."""

    def __init__(
        self,
        worker: WorkerInfo,
        identity: RouterIdentity,
        peers: Peers,
        *,
        lost: Callable[[], None],
        answered: Callable[[], None],
    ):
        """`lost` is called when the worker is lost, `answered` when it has welcomed this router."""
        self.worker = worker
        self.incarnation = identity.incarnation
        self._identity = identity
        self._opener = Opener(worker, identity, peers)
        self._on_lost, self._on_answered = lost, answered
        self._loop = asyncio.get_running_loop()
        self._machine = StateMachine(LinkState.CONNECTING, TRANSITIONS, f"link to {worker.name}")
        self._connection: Connection | None = None  # the newest that has attached
        self._outgoing = Outgoing()
        self._handles = Handles(self, identity, self._outgoing, self._flush_soon)
        self._flushing = False
        self._ended = asyncio.Event()  # the connection is gone, or given up
        self._wanted = asyncio.Event()  # by a handle that was opened while the worker was lost
        self._heard = self._loop.time()
        self._moving: asyncio.Task[None] | None = None
        self._greeting: asyncio.Timeout | None = None  # of the connection that _move opens
        self._is_moved = False  # the worker sends nothing more on this connection
        self._moved_at = -math.inf  # when the link last moved
        self._malformed_at = -math.inf  # when the worker last broke the protocol
        self._task = self._loop.create_task(self._run())
        self.is_lost = False  # until the worker welcomes this router again

    @property
    def state(self) -> LinkState:
        return self._machine.state

    @property
    def idle(self) -> bool:
        return not self._handles

    @property
    def silent_seconds(self) -> float:
        """Since the last beat or entry of the worker, or since it stopped reading; 0 while no connection is up."""
        if self._connection is None:
            return 0.0
        return self._loop.time() - min(self._heard, self._connection.blocked_since)

    @property
    def certificates(self) -> int | None:
        """The version of the files that opened the connection; None while there is none."""
        return self._connection.certificates if self._connection is not None else None

    # --- handles -----------------------------------------------------------------------------------------

    def open(self, reader: Reader) -> LinkHandle:
        handle = self._handles.open(reader, self._loop.time())
        self._wanted.set()
        return handle

    def credit(self, number: int, choice: int, limit: int) -> None:
        if number in self._handles:
            fault = self._identity.at_credit(self.worker.worker_id)
            if fault is not None and fault.act is Act.DROP:
                return
            self._outgoing.credit(number, choice, limit)
            self._flush_soon()

    async def cancel(self, handle: LinkHandle, seconds: float) -> bool:
        if self._connection is None or handle.number not in self._handles:
            return False
        if handle.cancelled is None:
            handle.cancelled = self._loop.create_future()
            self._outgoing.cancel(handle.number)
            self._flush_soon()
        done, _ = await asyncio.wait([handle.cancelled], timeout=seconds)
        return bool(done) and not handle.cancelled.cancelled()

    def drop(self, number: int) -> None:
        self._handles.drop(number)

    # --- time ----------------------------------------------------------------------------------------------

    def beat(self) -> None:
        if self._connection is not None:
            self._outgoing.beat()
            self._flush_soon()

    def ask(self, silent_seconds: float) -> None:
        """Ask the worker for the states of handles that have been silent for longer."""
        if self._connection is not None:
            self._handles.ask(self._loop.time(), silent_seconds)

    def allow_delay(self, seconds: float) -> None:
        """Allow for a delay of this process: frames that arrived meanwhile may be unread."""
        self._heard = min(self._loop.time(), self._heard + seconds)

    def restart_clocks(self) -> None:
        """Count silence from now: this process was stopped, and frames that arrived meanwhile are unread."""
        self._heard = now = self._loop.time()
        if self._connection is not None:
            self._connection.restart_clock()
        self._handles.restart_clocks(now)

    def give_up(self, error: BatonError) -> None:
        """Lose the worker, which is silent or breaks the protocol: all its handles are lost at once."""
        if self._connection is not None:
            self._break(LinkState.LOST)
            self._handles.lose_all(error)

    def move(self) -> None:
        """Open another connection and attach there."""
        if self._machine.may(LinkState.MOVING):
            self._machine.to(LinkState.MOVING)
            self._moving = self._loop.create_task(self._move())

    async def close(self) -> None:
        self._handles.lose_all(PeerLostError("this router is stopping"))
        self._machine.to(LinkState.CLOSED)
        for task in (self._task, self._moving):
            if task is not None:
                task.cancel()
        await asyncio.gather(
            *(t for t in (self._task, self._moving) if t is not None), return_exceptions=True
        )
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- opening -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        was_up, flaps = False, 0
        while True:
            try:
                connection = await self._opener.open(self, was_up, max(0, flaps - 1))
                self._attach(connection)
            except BatonError as error:
                self._lose(error)
            except Exception as error:  # without its task, the link's handles would wait for ever
                log.exception("link to %s failed", self.worker.name)
                self._lose(InternalError(f"{type(error).__name__}: {error}"))
            else:
                was_up, up_at = True, self._loop.time()
                await self._ended.wait()
                self._ended.clear()
                flaps = flaps + 1 if self._loop.time() - up_at < STEADY_SECONDS else 0
            if self.state is LinkState.LOST:
                was_up, self.is_lost = False, True
                self._on_lost()
                await self._pause()
            self._machine.to(LinkState.CONNECTING)

    def _lose(self, error: BatonError) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        if self._machine.may(LinkState.LOST):
            self._machine.to(LinkState.LOST)
        self._handles.lose_all(error)

    def _attach(self, connection: Connection) -> None:
        """Make this connection the link. The worker cancels handles that the list does not name."""
        moving = self.state is LinkState.MOVING
        if not moving:
            self._machine.to(LinkState.GREETED)
            self._machine.to(LinkState.ATTACHING)
        self._is_moved = False
        self._outgoing.clear()
        attaches = self._handles.attaches()
        self._connection = connection
        for frame in attach_frames(attaches, self._identity.handle_after):
            connection.write(frame)
        self._heard = self._loop.time()
        self._machine.to(LinkState.UP)
        self.is_lost = False
        self._on_answered()
        fault = self._identity.at_attach(self.worker.worker_id)
        if fault is not None and fault.act is Act.RESET:
            connection.abort()

    async def _move(self) -> None:
        """Replace the connection. The older one is used until then, and cut after MOVE_SECONDS."""
        older = self._connection
        assert older is not None, "the link is up"
        self._loop.call_later(MOVE_SECONDS, older.abort)
        await asyncio.sleep(self._moved_at + MOVE_PAUSE_SECONDS - self._loop.time())
        logged = ""  # the same reason is not logged at every attempt
        while self._connection is older:
            seconds = MOVED_SECONDS if self._is_moved else CONNECT_SECONDS
            try:
                async with asyncio.timeout(seconds) as self._greeting:
                    connection = await self._opener.greet(self)
                    self._greeting = None
            except (OSError, TimeoutError, BatonError) as error:
                self._greeting = None
                reason = str(error) or "no answer"
                if reason != logged:
                    text = "link to %s: opening its next connection failed; retrying: %s"
                    log.warning(text, self.worker.name, reason)
                logged = reason
                await asyncio.sleep(RETRY_SECONDS[1] if self._is_moved else MOVE_PAUSE_SECONDS)
                continue
            if self._connection is older:
                self._attach(connection)
                self._moved_at = self._loop.time()
            else:
                connection.abort()  # the older one broke meanwhile

    async def _pause(self) -> None:
        """Wait before the next attempt at a lost worker, no longer than until a request is placed on it."""
        self._wanted.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOST_PAUSE_SECONDS):
                await self._wanted.wait()

    def _break(self, state: LinkState) -> None:
        connection, self._connection = self._connection, None
        self._machine.to(state)
        self._ended.set()
        if connection is not None:
            connection.abort()

    # --- frames (router.link.connection.Frames) ------------------------------------------------------------

    def gone(self, connection: Connection, error: Exception | None) -> None:
        if connection is not self._connection:
            return
        log.info("link to %s broke: %s", self.worker.name, error or "closed by the worker")
        now = self._loop.time()
        if connection.malformed and now - self._malformed_at < MALFORMED_SECONDS:
            self.give_up(PeerLostError(f"{self.worker.worker_id} broke the link's protocol twice"))
        else:
            self._break(LinkState.BROKEN)
        if connection.malformed:
            self._malformed_at = now

    def writable(self, connection: Connection) -> None:
        if connection is self._connection:
            self._flush_soon()

    def take(
        self, connection: Connection, frame: link_pb2.WorkerFrame, entries: int
    ) -> Iterator[None] | None:
        if frame.notice:
            self._notice(connection, frame.notice)
        tokens = len(frame.tokens.handle)
        if tokens or frame.HasField("beat") or frame.extras or frame.ends:
            self._heard = connection.heard
        if entries == tokens <= ENTRIES_PER_TURN:  # the frame of an ordinary step, or a beat
            self._handles.take_tokens(frame.tokens, self._heard)
            return None
        pieces = self._handles.take(frame, self._heard, lambda: connection is self._connection)
        if entries > ENTRIES_PER_TURN:
            return pieces
        for _ in pieces:
            pass
        return None

    def _notice(self, connection: Connection, notice: link_pb2.LinkNotice.ValueType) -> None:
        if notice == link_pb2.LINK_NOTICE_MOVED:
            if connection is not self._connection:
                connection.close()
            else:
                self._moved()
        elif notice == link_pb2.LINK_NOTICE_GO_AWAY:
            if connection is self._connection:
                self.move()
        elif notice == link_pb2.LINK_NOTICE_FENCED and connection is self._connection:
            self.give_up(PeerLostError(f"{self.worker.worker_id} was fenced: its epoch has ended"))

    def _moved(self) -> None:
        """The next connection owns the handles: the worker has read its hello. The worker cancels them unless it attaches
        in time, so a stalled greeting is given up early."""
        self._is_moved = True
        greeting = self._greeting
        if greeting is not None and not greeting.expired():
            greeting.reschedule(self._loop.time() + MOVED_SECONDS)

    def _flush_soon(self) -> None:
        if not self._flushing and self._connection is not None:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write what was added in this turn of the event loop."""
        self._flushing = False
        if self._connection is not None and not self._connection.blocked:
            for frame in self._outgoing.frames():
                self._connection.write(frame)
