"""Points for fault injection. Product code looks up its points once at start and calls them as requests pass.

An unarmed point is `nothing`: a call of some tens of nanoseconds, never in a loop over bytes or layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Point(Enum):
    """Points in the order in which a request passes them; then those of links, whose frames serve many requests."""

    ROUTER_PLACED = "router.placed"  # charged; the workers have not been called
    PREFILL_ADMITTED = "prefill.admitted"  # taken off the queue; nothing is reserved
    DECODE_RESERVED = "decode.reserved"  # D has reserved blocks; the answer has not reached P
    PREFILL_RESERVED = "prefill.reserved"  # P has the grant; nothing is computed
    SENDER_GRANTED = "sender.granted"  # a slot is granted; nothing is written
    SENDER_WRITTEN = "sender.written"  # a write is posted and may be in progress
    LANDING_LANDED = "landing.landed"  # the bytes are in the slot, not yet verified
    LANDING_SCATTERED = "landing.scattered"  # copied into the blocks; not yet reported to D's leader
    PREFILL_COMPUTED = "prefill.computed"  # the first token is sent; Finish is not
    DECODE_COMMITTING = "decode.committing"  # everything has landed; not committed
    DECODE_COMMITTED = "decode.committed"  # committed; P is not yet notified
    PREFILL_FINISHED = "prefill.finished"  # P was notified of the commit and still holds its blocks
    DECODE_TOKENS = "decode.tokens"  # before the tokens of a step are sent
    DECODE_DONE = "decode.done"  # the last token is sent; the end is not
    ROUTER_TOKEN = "router.token"  # a token has arrived from a worker; not yet sent to the client
    ROUTER_DONE = "router.done"  # every token is sent to the client; the end is not
    LINK_FRAME = "link.frame"  # at a worker: a frame is about to be written
    LINK_CREDIT = "link.credit"  # at a router: credit is about to be sent
    LINK_ATTACH = "link.attach"  # at a router: a link has attached its handles; nothing was answered


class Act(Enum):
    KILL = "kill"  # this process, by SIGKILL
    STOP = "stop"  # this process, by SIGSTOP, until SIGCONT
    DELAY = "delay"  # blocks the thread at a point; sends a message after later ones
    DROP = "drop"
    TWICE = "twice"
    CORRUPT = "corrupt"
    RESET = "reset"  # the connection, behind what was written
    HALF = "half"  # half of the frame is written, then the connection is reset


@dataclass(frozen=True)
class FaultAction:
    """A fault that the code at the point has to carry out itself."""

    act: Act
    seconds: float = 0.0


FaultPoint = Callable[[object], "FaultAction | None"]  # called with the request's id
# Called with the message's kind (a field of the oneofs between P and D) and the request's id
MessagePoint = Callable[[str, object], "FaultAction | None"]


class Faults(Protocol):
    def point(self, point: Point) -> FaultPoint: ...

    def messages(self) -> MessagePoint: ...


def nothing(whose: object) -> None:
    """An unarmed point."""
    return


def no_message_fault(kind: str, whose: object) -> None:
    """An unarmed message point."""
    return


class NoFaults:
    """The points of production: none is armed."""

    def point(self, point: Point) -> FaultPoint:
        return nothing

    def messages(self) -> MessagePoint:
        return no_message_fault


NO_FAULTS = NoFaults()


def inject(
    inject: FaultAction, put: Callable[[], None], later: Callable[[float, Callable[[], None]], object]
) -> None:
    """Send a message as often and as late as ordered. `later(seconds, call)` is the event loop's."""
    if inject.act is Act.DELAY:
        later(inject.seconds, put)
    elif inject.act is not Act.DROP:
        put()
        if inject.act is Act.TWICE:
            put()
