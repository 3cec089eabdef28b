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
from cluster.protocol.times import LOST_SECONDS
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
MOVE_PAUSE_SECONDS = 1.0  # between attempts to move, and from one move to the next
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
        self._received_at = self._loop.time()  # of the last beat, token or end
        self._moving: asyncio.Task[None] | None = None
        self._greeting: asyncio.Timeout | None = None  # of the connection that _move opens
        self._is_moved = False  # the worker sends nothing more on this connection
        self._moved_at = -math.inf  # when a connection last replaced one that was up
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
        connection = self._connection  # once: scrapes read it on their own thread
        if connection is None:
            return 0.0
        return self._loop.time() - min(self._received_at, connection.blocked_since)

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
        self._received_at = min(self._loop.time(), self._received_at + seconds)
        if self._connection is not None:
            self._connection.allow_delay(seconds)

    def restart_clocks(self) -> None:
        """Count silence from now: this process was stopped, and frames that arrived meanwhile are unread."""
        self.allow_delay(math.inf)
        self._handles.restart_clocks(self._loop.time())

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
        was_up, flaps, alive_at = False, 0, 0.0
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
                up_at = self._loop.time()
                was_up, alive_at = True, alive_at if was_up else up_at
                await self._ended.wait()
                self._ended.clear()
                now = self._loop.time()
                flaps = flaps + 1 if now - up_at < STEADY_SECONDS else 0
                if self._received_at > up_at:
                    alive_at = now
                elif self.state is LinkState.BROKEN and now - alive_at > LOST_SECONDS:  # over all of them
                    self._lose(PeerLostError(f"links to {self.worker.worker_id} end before anything comes"))
            if self.state is LinkState.LOST:
                was_up, self.is_lost = False, True
                self._on_lost()
                await self._pause()
            self._machine.to(LinkState.CONNECTING)

    def _lose(self, error: BatonError) -> None:
        self._drop_connection()
        if self._machine.may(LinkState.LOST):
            self._machine.to(LinkState.LOST)
        self._handles.lose_all(error)

    def _attach(self, connection: Connection) -> None:
        """Make this connection the link. The worker cancels handles that the list does not name."""
        if self.state is LinkState.MOVING:
            self._moved_at = self._loop.time()
        else:
            self._machine.to(LinkState.GREETED)
            self._machine.to(LinkState.ATTACHING)
        self._is_moved = False
        self._outgoing.clear()
        attaches = self._handles.attaches()
        self._connection = connection
        for frame in attach_frames(attaches, self._identity.handle_after):
            connection.write(frame)
        self._received_at = self._loop.time()
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
        logged = ""  # the same reason is not logged at every attempt
        # A worker may ask for the next one again and again.
        await asyncio.sleep(max(0.0, self._moved_at + MOVE_PAUSE_SECONDS - self._loop.time()))
        while self._connection is older:
            try:
                connection = await self._greet_next(MOVED_SECONDS if self._is_moved else CONNECT_SECONDS)
            except (OSError, TimeoutError, BatonError) as error:
                reason = str(error) or "no answer"
                if reason != logged:
                    text = "link to %s: opening its next connection failed; retrying: %s"
                    log.warning(text, self.worker.name, reason)
                logged = reason
                await asyncio.sleep(RETRY_SECONDS[1] if self._is_moved else MOVE_PAUSE_SECONDS)
                continue
            if self._connection is older:
                self._attach(connection)
            else:
                connection.abort()  # the older one broke meanwhile

    async def _greet_next(self, seconds: float) -> Connection:
        """Raises OSError, TimeoutError or BatonError."""
        try:
            async with asyncio.timeout(seconds) as self._greeting:
                return await self._opener.greet(self)
        finally:
            self._greeting = None

    async def _pause(self) -> None:
        """Wait before the next attempt at a lost worker, no longer than until a request is placed on it."""
        if not self.idle:  # one was, since the worker was lost
            return
        self._wanted.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOST_PAUSE_SECONDS):
                await self._wanted.wait()

    def _break(self, state: LinkState) -> None:
        self._drop_connection()
        if self.state is not LinkState.CLOSED:  # worker and router may stop together
            self._machine.to(state)
            self._ended.set()

    def _drop_connection(self) -> None:
        """Before the next one: the one that _move opens could have a higher serial than that, and would take the handles
        from it, and be closed here."""
        if self._moving is not None:
            self._moving.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    # --- frames (router.link.connection.ConnectionOwner) ----------------------------------------------------

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
        is_newest = connection is self._connection
        if is_newest and (tokens or frame.HasField("beat") or frame.extras or frame.ends):
            self._received_at = connection.received_at
        if is_newest and entries == tokens <= ENTRIES_PER_TURN:  # the frame of an ordinary step, or a beat
            self._handles.take_tokens(frame.tokens, self._received_at)
            return None
        pieces = self._handles.take(frame, self._received_at, lambda: connection is self._connection)
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
