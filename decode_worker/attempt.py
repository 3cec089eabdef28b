"""One attempt, as the decode worker sees it.

EXPECTED → RESERVED → DECODING → ENDED        Attach may come before Reserve; commit makes it decode
EXPECTED → DECODING → ENDED                   Decode.Run: prefilled here
any → ENDED
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from cluster.state_machine import StateMachine
from wire import common_pb2
from worker.attempt_log import AttemptLog


class DecodeState(Enum):
    EXPECTED = "expected"
    RESERVED = "reserved"
    DECODING = "decoding"
    ENDED = "ended"


TRANSITIONS: dict[DecodeState, frozenset[DecodeState]] = {
    DecodeState.EXPECTED: frozenset({DecodeState.RESERVED, DecodeState.DECODING, DecodeState.ENDED}),
    DecodeState.RESERVED: frozenset({DecodeState.DECODING, DecodeState.ENDED}),
    DecodeState.DECODING: frozenset({DecodeState.ENDED}),
}


@dataclass(eq=False)
class DecodeAttempt:
    transfer_id: bytes
    request_id: str
    log: AttemptLog
    choices: int = 1
    paused: bool = False
    local: bool = False  # prefilled here
    machine: StateMachine[DecodeState] = field(init=False)
    report: common_pb2.WorkReport = field(default_factory=common_pb2.WorkReport)
    entered: float = field(default_factory=time.monotonic)  # received, or committed
    first_token: float | None = None  # when this engine's first token came

    def __post_init__(self) -> None:
        self.machine = StateMachine(DecodeState.EXPECTED, TRANSITIONS, f"decode {self.engine_id}")

    @property
    def engine_id(self) -> str:
        return self.transfer_id.hex()

    def token_came(self) -> None:
        if self.first_token is None:
            self.first_token = time.monotonic()

    def finish_report(self) -> common_pb2.WorkReport:
        """Seconds in this engine, split at its first token (a local prefill's first part is prefill)."""
        now = time.monotonic()
        first = self.first_token if self.first_token is not None else now
        if self.local:
            self.report.prefill_seconds = first - self.entered
        else:
            self.report.decode_queue_seconds = first - self.entered
        self.report.decode_seconds = now - first
        return self.report
