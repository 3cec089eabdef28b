"""The routers that read this worker's attempts: one entry per router process, with its handles and its link."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from cluster.background_tasks import BackgroundTasks
from cluster.errors import InvalidRequestError, StaleTransferError
from cluster.protocol.link import SHARED_WINDOW_VERSION
from cluster.protocol.times import DETACH_SECONDS
from wire import common_pb2, link_pb2
from worker.link.handle import Handle, HandleState, Key
from worker.link.handle_numbers import HandleNumbers

log = logging.getLogger(__name__)
# Numbers whose attempts have not come: of one router process, because calls are on the way for a moment only, and of all
# (5 MiB), because each of a port's connections may be another one.
MAX_EARLY = 4096
MAX_EARLY_OF_ALL = 65_536


class Session(Protocol):
    """One link, as its router's entry uses it: worker.link.session.Session."""

    incarnation: int
    serial: int
    version: int

    def due(self, handle: Handle) -> None:
        """The handle has something to send."""

    def drop(self, number: int) -> None:
        """Send nothing more of the handle."""

    def answer(self, state: link_pb2.HandleState) -> None: ...

    def cancelled(self, number: int, end: common_pb2.AttemptEnd | None = None) -> None: ...

    def moved(self) -> None: ...

    def fenced(self) -> None: ...


@dataclass(eq=False)
class Router:
    """One process of a router."""

    incarnation: int
    serial: int = 0
    owner: Session | None = None  # the session with the highest serial, from its hello on
    session: Session | None = None  # the owner, once it has attached
    handles: dict[int, Handle] = field(default_factory=dict)


class Routers:
    """Handles by router and number. `cancel` ends an attempt and returns when its blocks are free; `forget` drops one
    that has ended and was read."""

    def __init__(
        self,
        *,
        cancel: Callable[[bytes], Awaitable[object]],
        forget: Callable[[bytes], None],
        credited: Callable[[bytes], None],
        detach_seconds: float = DETACH_SECONDS,
    ):
        """`credited`: the router of this attempt has taken tokens, so that a paused request may go on."""
        self._cancel = cancel
        self._forget = forget
        self._credited = credited
        self._detach_seconds = detach_seconds
        self._routers: dict[int, Router] = {}
        self._cancelled = HandleNumbers(MAX_EARLY, MAX_EARLY_OF_ALL)  # before their attempt came
        # By the owner's list, until it is complete; those with an attempt are marked themselves.
        self._named = HandleNumbers(MAX_EARLY, MAX_EARLY_OF_ALL)
        self._background_tasks = BackgroundTasks()

    def __len__(self) -> int:
        return sum(len(router.handles) for router in self._routers.values())

    # --- attempts ----------------------------------------------------------------------------------------

    def check_free(self, key: Key) -> None:
        """Raises InvalidRequestError if the handle stands for another attempt, StaleTransferError if it was cancelled."""
        router = self._routers.get(key[0])
        if router is None:
            return
        if key[1] in router.handles:
            raise InvalidRequestError(f"handle {key[1]} is in use", field="handle")
        if self._cancelled.has(*key):
            raise StaleTransferError(f"handle {key[1]} was cancelled before its attempt came", field="handle")

    def open(self, handle: Handle) -> None:
        """A new attempt. Without a link of its router it waits the detach time for one."""
        router = self._routers.setdefault(handle.incarnation, Router(handle.incarnation))
        router.handles[handle.number] = handle
        if router.session is not None:
            self._fit(handle, router.session)
            handle.to(HandleState.OPEN, router.session)
        else:
            self._wait(handle, self._give_up)

    def closed(self, handle: Handle) -> None:
        """The attempt is forgotten."""
        handle.stop_timer()
        if handle.machine.may(HandleState.FORGOTTEN):
            handle.to(HandleState.FORGOTTEN)
        router = self._routers.get(handle.incarnation)
        if router is None:
            return
        if router.handles.get(handle.number) is handle:
            del router.handles[handle.number]
        if router.session is not None:
            router.session.drop(handle.number)
        self._drop_idle(router)

    def detached(self) -> int:
        """Attempts without a link of their router."""
        return sum(
            handle.machine.state is HandleState.DETACHED
            for router in self._routers.values()
            for handle in router.handles.values()
        )

    # --- sessions ----------------------------------------------------------------------------------------

    def greeted(self, session: Session) -> bool:
        """Take a link whose hello came: it owns its router's handles. False: a newer link of this router owns them."""
        router = self._routers.setdefault(session.incarnation, Router(session.incarnation))
        if session.serial <= router.serial:
            self._drop_idle(router)
            return False
        older, router.owner, router.session = router.owner, session, None
        router.serial = session.serial
        self._named.drop(session.incarnation)
        if older is not None:
            self._detach(router)
            older.moved()
        return True

    def attach(self, session: Session, attach: link_pb2.LinkAttach) -> None:
        """A handle that the new link reads, before its list is complete."""
        router = self._routers.get(session.incarnation)
        if router is None or router.owner is not session:
            return
        handle = router.handles.get(attach.handle)
        # Being cancelled, because its detach time is over: it would be forgotten without an end.
        if handle is not None and (handle.transfer_id != attach.transfer_id or handle.cancelling):
            session.answer(link_pb2.HandleState(handle=attach.handle))
            return
        if handle is not None:
            handle.named_by = session.serial
            self._guarded(handle, partial(self._attach, session, handle, attach))
        else:  # its Run may come before the list is complete
            self._named.add(session.incarnation, attach.handle)
            session.answer(link_pb2.HandleState(handle=attach.handle))

    @staticmethod
    def _fit(handle: Handle, session: Session) -> None:
        """Give the handle the windows of the session's link version."""
        if session.version < SHARED_WINDOW_VERSION:
            handle.log.widen()

    def _attach(self, session: Session, handle: Handle, attach: link_pb2.LinkAttach) -> None:
        self._fit(handle, session)
        if not handle.log.resume(attach.next, attach.limit):
            session.answer(link_pb2.HandleState(handle=handle.number))
            self._give_up(handle)
            return
        handle.stop_timer()
        handle.to(HandleState.OPEN, session)
        session.answer(handle.state())
        session.due(handle)
        self._credited(handle.transfer_id)

    def attached(self, session: Session, next_handle: int) -> None:
        """The list is complete: what it does not name is cancelled."""
        router = self._routers.get(session.incarnation)
        if router is None or router.owner is not session:
            return
        router.session = session
        for handle in list(router.handles.values()):
            if handle.number < next_handle and not self._is_named(session, handle):
                self._give_up(handle)
                continue
            # Dispatched since it was named, or since the list was made.
            if handle.machine.state is HandleState.DETACHED:
                handle.stop_timer()
                self._fit(handle, session)
                handle.to(HandleState.OPEN, session)
                self._credited(handle.transfer_id)
            session.due(handle)
        self._named.drop(session.incarnation)

    def _is_named(self, session: Session, handle: Handle) -> bool:
        return handle.named_by == session.serial or self._named.has(session.incarnation, handle.number)

    def ended(self, session: Session) -> None:
        """The connection is closed. An older link's end changes nothing."""
        router = self._routers.get(session.incarnation)
        if router is None or router.owner is not session:
            return
        router.owner = router.session = None
        self._named.drop(session.incarnation)
        self._detach(router)
        self._drop_idle(router)

    def sent_end(self, handle: Handle) -> None:
        """It is kept until Close, because the frame may be lost with its link."""
        handle.to(HandleState.ENDED)

    # --- frames of a router --------------------------------------------------------------------------------

    def credit(self, session: Session, credit: link_pb2.LinkCredit) -> None:
        handle = self._handles(session).get(credit.handle)
        if handle is not None:
            self._guarded(handle, partial(self._credit, session, handle, credit))

    def _credit(self, session: Session, handle: Handle, credit: link_pb2.LinkCredit) -> None:
        if handle.log.credit(credit.choice, credit.limit):
            session.due(handle)
            self._credited(handle.transfer_id)

    def cancel(self, session: Session, number: int) -> None:
        """Answered when blocks and staging are free; at once if there is no such attempt."""
        handle = self._handles(session).get(number)
        if handle is None:
            self._remember_cancelled(session, number)
            session.cancelled(number)
        elif not handle.cancelling:
            handle.cancelling = True
            self._background_tasks.spawn(self._cancel_and_answer(session, handle))

    def _remember_cancelled(self, session: Session, number: int) -> None:
        """Its Run or Reserve may be on the way: the link may overtake them."""
        if session.incarnation in self._routers:
            self._cancelled.add(session.incarnation, number)

    async def _cancel_and_answer(self, session: Session, handle: Handle) -> None:
        try:
            await self._cancel(handle.transfer_id)
        finally:
            session.cancelled(handle.number, None if handle.end_is_sent else handle.log.end_event)

    def close_handle(self, session: Session, number: int) -> None:
        """The router has read the end. Close for an attempt that has not ended is a cancel."""
        handle = self._handles(session).get(number)
        if handle is not None:
            self._forget_attempt(handle) if handle.log.ended else self._give_up(handle)

    def status(self, session: Session, number: int) -> None:
        handle = self._handles(session).get(number)
        session.answer(handle.state() if handle is not None else link_pb2.HandleState(handle=number))
        if handle is not None:
            session.due(handle)

    # --- the worker --------------------------------------------------------------------------------------

    def fence(self) -> None:
        """The epoch has ended: links end, and open again with the new one."""
        for router in list(self._routers.values()):
            if router.owner is not None:  # also one that has not attached yet
                router.owner.fenced()

    async def close(self, seconds: float) -> None:
        await self._background_tasks.wait(seconds)

    # -----------------------------------------------------------------------------------------------------

    def _handles(self, session: Session) -> dict[int, Handle]:
        router = self._routers.get(session.incarnation)
        return router.handles if router is not None else {}

    def _detach(self, router: Router) -> None:
        for handle in router.handles.values():
            if handle.machine.state is HandleState.OPEN:
                handle.to(HandleState.DETACHED)
                self._wait(handle, self._give_up)
            elif handle.machine.state is HandleState.ENDED and handle.timer is None:
                self._wait(handle, self._forget_attempt)

    def _guarded(self, handle: Handle, call: Callable[[], None]) -> None:
        """An exception of one attempt's entry ends that attempt: the link and the others of the frame go on."""
        try:
            call()
        except Exception:
            log.exception("attempt %s failed at an entry of its router", handle.transfer_id.hex())
            self._give_up(handle)

    def _wait(self, handle: Handle, then: Callable[[Handle], None]) -> None:
        handle.stop_timer()
        loop = asyncio.get_running_loop()
        handle.timer = loop.call_later(self._detach_seconds, then, handle)

    def _give_up(self, handle: Handle) -> None:
        handle.stop_timer()
        if handle.log.ended:
            self._forget(handle.transfer_id)
        elif not handle.cancelling:
            handle.cancelling = True
            self._background_tasks.spawn(self._cancel_attempt(handle))

    async def _cancel_attempt(self, handle: Handle) -> None:
        await self._cancel(handle.transfer_id)

    def _forget_attempt(self, handle: Handle) -> None:
        self._forget(handle.transfer_id)

    def _drop_idle(self, router: Router) -> None:
        if not router.handles and router.owner is None and self._routers.get(router.incarnation) is router:
            del self._routers[router.incarnation]
            self._cancelled.drop(router.incarnation)
