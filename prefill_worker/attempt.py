"""One attempt at the prefill worker.

QUEUED → ADMITTED → COMPUTING → SENT → RELEASED
   └────────┴───────────┴────────┴──► DRAINING → DRAINED
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from cluster.state_machine import StateMachine
from engine.request import PromptChunk, RequestDone, TokenOutput
from kv_transfer.prefill_side.handoff import PartTimes
from wire import common_pb2, prefill_pb2
from worker.attempt_log import AttemptLog
from worker.validate import admission_seconds

if TYPE_CHECKING:
    from opentelemetry.context import Context


class PrefillState(Enum):
    QUEUED = "queued"  # waits for its turn; nothing is reserved
    ADMITTED = "admitted"  # its turn: a reservation at the decode worker is requested
    COMPUTING = "computing"  # in the engine; parts leave as layers finish
    SENT = "sent"  # computed; the last parts and Finish are on their way
    # The decode worker has committed, or nothing was left to decode: blocks are prefix cache.
    RELEASED = "released"
    DRAINING = "draining"  # ended early; blocks are freed once no write reads them
    DRAINED = "drained"


_END = frozenset({PrefillState.DRAINING})
TRANSITIONS: dict[PrefillState, frozenset[PrefillState]] = {
    PrefillState.QUEUED: _END | {PrefillState.ADMITTED},
    PrefillState.ADMITTED: _END | {PrefillState.COMPUTING},
    PrefillState.COMPUTING: _END | {PrefillState.SENT, PrefillState.RELEASED},
    PrefillState.SENT: _END | {PrefillState.RELEASED},
    PrefillState.DRAINING: frozenset({PrefillState.DRAINED}),
}


@dataclass(frozen=True)
class Prefilled:
    """The engine's result for a prompt: the first token of every choice, and how much was computed."""

    tokens: list[TokenOutput]
    done: RequestDone


@dataclass(eq=False)
class PrefillAttempt:
    request: prefill_pb2.PrefillRunRequest
    log: AttemptLog
    received: float = field(default_factory=time.monotonic)
    machine: StateMachine[PrefillState] = field(init=False)
    report: common_pb2.WorkReport = field(default_factory=common_pb2.WorkReport)
    task: asyncio.Task[None] | None = None
    returned_to_router: bool = False  # this worker leaves: the router dispatches the request again
    prefilled: asyncio.Future[Prefilled] = field(init=False)
    tokens: list[TokenOutput] = field(default_factory=list)
    chunks: tuple[PromptChunk, ...] = ()
    trace: Context | None = None  # the router's span, where the request is traced
    parts: PartTimes | None = None
    freed: asyncio.Event = field(default_factory=asyncio.Event)  # set once it holds no block

    def __post_init__(self) -> None:
        self.freed.set()  # until it is admitted
        self.machine = StateMachine(PrefillState.QUEUED, TRANSITIONS, f"prefill {self.engine_id}")
        self.prefilled = asyncio.get_running_loop().create_future()

    @property
    def transfer_id(self) -> bytes:
        return self.request.transfer_id

    @property
    def engine_id(self) -> str:
        """The attempt's request id in the engine, where every attempt is a request."""
        return self.request.transfer_id.hex()

    @property
    def token_count(self) -> int:
        return (len(self.request.spec.prompt_tokens) + len(self.request.spec.output_tokens)) // 4

    @property
    def deadline(self) -> float:
        """When it must have a reservation (monotonic seconds)."""
        return self.received + admission_seconds(self.request)
