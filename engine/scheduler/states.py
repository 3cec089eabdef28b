"""States of a sequence in the engine.

WAITING ──admitted──► RUNNING ──► FINISHED
   ▲                  │  ▲  └─prefill_only, or parked─► HELD ──► FINISHED
   └───preempted──────┘  └─commit─ WAITING_FOR_KV (reserved, KV on its way)
                                        └──growth needs its blocks──► EVICTED (until all writes ended) ──► FINISHED
"""

from __future__ import annotations

from enum import Enum


class SequenceState(Enum):
    WAITING = "waiting"
    WAITING_FOR_KV = "waiting_for_kv"
    EVICTED = "evicted"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"


S = SequenceState
TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    S.WAITING: frozenset({S.RUNNING, S.FINISHED}),
    S.WAITING_FOR_KV: frozenset({S.RUNNING, S.EVICTED, S.FINISHED}),
    S.EVICTED: frozenset({S.FINISHED}),
    S.RUNNING: frozenset({S.WAITING, S.HELD, S.FINISHED}),
    S.HELD: frozenset({S.FINISHED}),
}
