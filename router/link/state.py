"""States of a router's link to a worker.

CONNECTING → GREETED → ATTACHING → UP → BROKEN → CONNECTING      a break: all handles attach again
                                   UP → MOVING → UP              age or changed certificates: a new connection attaches
CONNECTING, BROKEN, UP → LOST → CONNECTING                       all handles are lost; another try after a pause
any → CLOSED
"""

from __future__ import annotations

from enum import Enum


class LinkState(Enum):
    CONNECTING = "connecting"
    GREETED = "greeted"
    ATTACHING = "attaching"
    UP = "up"
    BROKEN = "broken"
    MOVING = "moving"
    LOST = "lost"
    CLOSED = "closed"


_CLOSED = frozenset({LinkState.CLOSED})
_BREAKS = frozenset({LinkState.BROKEN, LinkState.LOST}) | _CLOSED
TRANSITIONS: dict[LinkState, frozenset[LinkState]] = {
    LinkState.CONNECTING: _BREAKS | {LinkState.GREETED},
    LinkState.GREETED: _BREAKS | {LinkState.ATTACHING},
    LinkState.ATTACHING: _BREAKS | {LinkState.UP},
    LinkState.UP: _BREAKS | {LinkState.MOVING},
    LinkState.MOVING: _BREAKS | {LinkState.UP},
    LinkState.BROKEN: _CLOSED | {LinkState.CONNECTING, LinkState.LOST},
    LinkState.LOST: _CLOSED | {LinkState.CONNECTING},
}
