"""Where a process may be broken, and how. Product code asks for its points once, at start, and calls them in passing.

A point that nobody armed is `nothing`: a call of some tens of nanoseconds, never in a loop over bytes or layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Point(Enum):
    """In the order in which a request passes them."""

    ROUTER_PLACED = "router.placed"  # charged; the workers have not been called
    PREFILL_ADMITTED = "prefill.admitted"  # its turn has come; nothing is reserved
    DECODE_RESERVED = "decode.reserved"  # D holds blocks; P does not know yet
    PREFILL_RESERVED = "prefill.reserved"  # P knows; nothing is computed
    SENDER_GRANTED = "sender.granted"  # a slot is granted; nothing is written
    SENDER_WRITTEN = "sender.written"  # a write is posted; it may be under way
    LANDING_LANDED = "landing.landed"  # the bytes are in the slot, not checked
    LANDING_SCATTERED = "landing.scattered"  # they are in the blocks; D's leader does not know yet
    PREFILL_COMPUTED = "prefill.computed"  # the first token is out; Finish is not said
    DECODE_COMMITTING = "decode.committing"  # everything is here; not committed
    DECODE_COMMITTED = "decode.committed"  # committed; P does not know yet
    PREFILL_FINISHED = "prefill.finished"  # P knows that D has committed; it still holds its blocks
    DECODE_TOKENS = "decode.tokens"  # a step's tokens are about to leave
    DECODE_DONE = "decode.done"  # the last token is out; the end is not said
    ROUTER_TOKEN = "router.token"  # a token came from a worker; the client has not got it
    ROUTER_DONE = "router.done"  # every token is out; the client has not got the end


# Kinds of message between P and D (the fields of their oneofs) that may be dropped, doubled or late.
# `drained` and `abort` are never dropped: the stream delivers in order, or it breaks and they are said again.
DROPPABLE = ("reserve", "slot_request", "finish", "reserve_reply", "slot_grant", "part_result", "committed")
MESSAGES = (*DROPPABLE, "abort", "drained", "aborted", "part")


class Act(Enum):
    KILL = "kill"  # this process, by SIGKILL
    STOP = "stop"  # this process, by SIGSTOP, until somebody sends SIGCONT
    DELAY = "delay"  # a stall of the thread at a point; a message goes out later than those after it
    DROP = "drop"
    TWICE = "twice"
    CORRUPT = "corrupt"


@dataclass(frozen=True)
class FaultAction:
    """What is left for the code at the point to do."""

    act: Act
    seconds: float = 0.0


FaultPoint = Callable[[object], "FaultAction | None"]  # told whose request is at the point
MessagePoint = Callable[[str, object], "FaultAction | None"]  # a message's kind, and whose it is


class Faults(Protocol):
    def point(self, point: Point) -> FaultPoint: ...

    def messages(self) -> MessagePoint: ...


def nothing(whose: object) -> None:
    """A point that is not armed."""
    return


def nothing_said(kind: str, whose: object) -> None:
    """Messages that are not meddled with."""
    return


class NoFaults:
    """What runs outside tests."""

    def point(self, point: Point) -> FaultPoint:
        return nothing

    def messages(self) -> MessagePoint:
        return nothing_said


NO_FAULTS = NoFaults()


def inject(
    strike: FaultAction, put: Callable[[], None], later: Callable[[float, Callable[[], None]], object]
) -> None:
    """Puts a message on its way as often, and as late, as was ordered. `later(seconds, call)` is the loop's."""
    if strike.act is Act.DELAY:
        later(strike.seconds, put)
    elif strike.act is not Act.DROP:
        put()
        if strike.act is Act.TWICE:
            put()
