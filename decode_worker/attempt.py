"""One attempt at the decode worker.

EXPECTED → RESERVED → COMMITTING → DECODING → ENDED    Reserve opens it; commit makes it decode
EXPECTED → DECODING → ENDED                            Decode.Run: local prefill, in its turn
any → ENDED

COMMITTING: the engine has been called. Until it answers the outcome is open, and an Abort waits: the step in progress
may take the reserved blocks.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from cluster.errors import BatonError
from cluster.state_machine import StateMachine
from engine.request import PromptChunk, RequestDone
from wire import common_pb2
from worker.attempt_log import AttemptLog

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from engine.compiled_grammar import CompiledGrammar


class DecodeState(Enum):
    EXPECTED = "expected"
    RESERVED = "reserved"
    COMMITTING = "committing"
    DECODING = "decoding"
    ENDED = "ended"


TRANSITIONS: dict[DecodeState, frozenset[DecodeState]] = {
    DecodeState.EXPECTED: frozenset({DecodeState.RESERVED, DecodeState.DECODING, DecodeState.ENDED}),
    DecodeState.RESERVED: frozenset({DecodeState.COMMITTING, DecodeState.ENDED}),
    DecodeState.COMMITTING: frozenset({DecodeState.DECODING, DecodeState.ENDED}),
    DecodeState.DECODING: frozenset({DecodeState.ENDED}),
}


@dataclass(eq=False)
class DecodeAttempt:
    transfer_id: bytes
    request_id: str
    log: AttemptLog
    choices: int = 1
    first_choice: int = 0
    first_position: int = 0  # of the tokens that a hand-off brings
    paused: bool = False
    local_prefill: bool = False
    whole_tokens: bool = False  # its tokens have log probabilities
    entering: asyncio.Task[None] | None = None  # waits for its turn at the engine, if it is local
    inside_tokens: int = 0  # its share of the admission's bound, until its first token
    tenant: str = ""  # to which that share is counted
    compiles: bool = False  # it is counted with the requests that compile a grammar
    compiling: asyncio.Task[CompiledGrammar] | None = None  # of a reservation, which the commit waits for
    machine: StateMachine[DecodeState] = field(init=False)
    report: common_pb2.WorkReport = field(default_factory=common_pb2.WorkReport)
    received: float = field(default_factory=time.monotonic)
    reserved: float = 0.0  # time of the reservation; 0 = none
    entered: float = field(default_factory=time.monotonic)  # time of its admission or commit
    is_entered: bool = False
    is_finished: bool = False  # it has ended with its last token
    abort_reason: BatonError | None = None  # why it is aborted, for its router; None: the router asked
    trace: Context | None = None  # the router's span, where the request is traced
    first_step: float = 0.0  # when the step that made this engine's first token began
    first_token: float | None = None  # its time
    chunks: tuple[PromptChunk, ...] = ()  # of a prompt that was computed here

    def __post_init__(self) -> None:
        self.machine = StateMachine(DecodeState.EXPECTED, TRANSITIONS, f"decode {self.engine_id}")

    @property
    def engine_id(self) -> str:
        return self.transfer_id.hex()

    @property
    def committed(self) -> bool:
        """Whether it has committed, also after the last token."""
        return self.machine.state is DecodeState.DECODING or self.is_finished

    def stop_compiling(self) -> None:
        if self.compiling is not None:
            self.compiling.cancel()

    def record_first_token(self, step_began: float) -> None:
        self.first_token = time.monotonic()
        self.first_step = max(self.entered, step_began)

    @property
    def first_token_seconds(self) -> float:
        """Seconds from the arrival of the request to this engine's first token; 0 before it."""
        return self.first_token - self.received if self.first_token is not None else 0.0

    def left_engine(self, done: RequestDone | None) -> None:
        """Report what the engine did for the prompt; None: it did not have the request."""
        if self.local_prefill and done is not None:
            self.report.cached_tokens = done.cached_tokens
            self.report.computed_prompt_tokens = done.computed_prompt_tokens
            self.report.prompt_compute_seconds = done.prompt_compute_seconds
            self.chunks = done.chunks

    def finish_report(self) -> common_pb2.WorkReport:
        """Fill in the seconds in queue and in the engine; of a local prefill, those to the first token are prefill."""
        report, now = self.report, time.monotonic()
        if self.first_token is None:
            report.decode_queue_seconds = 0.0 if self.local_prefill else now - self.entered
            report.prefill_queue_seconds = now - self.received if self.local_prefill else 0.0
        elif self.local_prefill:
            began = max(self.entered, self.chunks[0].began) if self.chunks else self.entered
            report.prefill_queue_seconds = began - self.received
            report.prefill_seconds = self.first_token - began
            report.decode_seconds = now - self.first_token
        else:
            report.decode_queue_seconds = self.first_step - self.entered
            report.first_step_seconds = self.first_token - self.first_step
            report.decode_seconds = now - self.first_step
        return report
