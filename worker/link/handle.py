"""An attempt whose tokens a router takes over its link.

OPEN ⇄ DETACHED (1.5 s → cancelled)      with and without a link of its router
OPEN → ENDED → FORGOTTEN                 the end was sent; on Close, or the detach time after its router's link broke
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Protocol

from cluster.errors import InvalidRequestError
from cluster.state_machine import StateMachine
from wire import common_pb2, link_pb2
from worker.attempt_log import AttemptLog

Key = tuple[int, int]  # a router process's incarnation, and its number for the handle


class HandleState(Enum):
    OPEN = "open"
    DETACHED = "detached"
    ENDED = "ended"
    FORGOTTEN = "forgotten"


TRANSITIONS: dict[HandleState, frozenset[HandleState]] = {
    HandleState.OPEN: frozenset({HandleState.DETACHED, HandleState.ENDED, HandleState.FORGOTTEN}),
    HandleState.DETACHED: frozenset({HandleState.OPEN, HandleState.FORGOTTEN}),
    HandleState.ENDED: frozenset({HandleState.OPEN, HandleState.FORGOTTEN}),
}


def key_of(reference: common_pb2.HandleRef) -> Key:
    """Raises InvalidRequestError: an incarnation is never 0."""
    if not reference.incarnation:
        raise InvalidRequestError("handle: the incarnation of the router is missing", field="handle")
    return reference.incarnation, reference.number


class TokenSender(Protocol):
    """The session that sends a handle's tokens: worker.link.session.Session."""

    def due(self, handle: Handle) -> None:
        """The handle has something to send."""


class Handle:
    """`number` stands for the attempt in every frame of its router's links."""

    __slots__ = (
        "cancelling",
        "end_is_sent",
        "incarnation",
        "log",
        "machine",
        "named_by",
        "number",
        "session",
        "timer",
        "transfer_id",
    )

    def __init__(
        self,
        key: Key,
        transfer_id: bytes,
        spec: common_pb2.GenerateSpec,
    ) -> None:
        self.incarnation, self.number = key
        self.transfer_id = transfer_id
        self.log = AttemptLog.of(spec, self._changed)
        self.session: TokenSender | None = None  # the link that sends its tokens, while it is open
        self.machine = StateMachine(HandleState.DETACHED, TRANSITIONS, f"handle {self.number}")
        self.timer: asyncio.TimerHandle | None = None  # while its router has no link
        self.cancelling = False
        self.end_is_sent = False  # on the link that it has now, or had when it was forgotten
        self.named_by = 0  # serial of the last link whose list has named it

    def _changed(self) -> None:
        """The log may have more to send."""
        if self.session is not None:
            self.session.due(self)

    def to(self, state: HandleState, session: TokenSender | None = None) -> None:
        """`session`: the link that sends its tokens from now on, if it is open."""
        if self.machine.state is not state:
            self.machine.to(state)
        if state is not HandleState.FORGOTTEN:
            self.end_is_sent = state is HandleState.ENDED
        self.session = session

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def state(self) -> link_pb2.HandleState:
        """Its state, for the router."""
        if self.log.ended:
            return link_pb2.HandleState(handle=self.number, kind=link_pb2.HandleState.ENDED)
        return link_pb2.HandleState(
            handle=self.number,
            kind=link_pb2.HandleState.OPEN,
            next=[choice.sent for choice in self.log.choices],
        )

    @property
    def waits(self) -> bool:
        """Whether something could be sent now."""
        return self.log.may_send or self.end_due

    @property
    def end_due(self) -> bool:
        state = self.machine.state
        return state is HandleState.OPEN and self.log.ended and self.log.all_sent
