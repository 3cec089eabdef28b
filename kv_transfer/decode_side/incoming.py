"""One hand-off at the decode worker: what has arrived, and what is still missing."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from cluster.errors import BatonError, DigestMismatchError, InternalError, TransportError
from cluster.state_machine import StateMachine
from kv_transfer.contract import HandoffSpec, HandoffState, Reservation
from kv_transfer.decode_side.coverage import Coverage, FlowKey
from kv_transfer.layout.geometry import Flow
from kv_transfer.messages import PartLanded
from wire import handoff_pb2

log = logging.getLogger(__name__)
# A prompt that is preempted at the prefill worker is computed, and shipped, again.
MAX_PARTS_PER_ROW = 8  # a row: one token in one layer
H = HandoffState
TRANSITIONS: dict[HandoffState, frozenset[HandoffState]] = {
    H.RESERVED: frozenset({H.RECEIVING, H.COMMITTED, H.ABORTED}),
    H.RECEIVING: frozenset({H.COMMITTED, H.ABORTED}),
}


@dataclass(eq=False)
class IncomingHandoff:
    spec: HandoffSpec
    reservation: Reservation
    peer: str
    prefill_epoch: int
    flows: list[Flow]
    num_layers: int
    machine: StateMachine[HandoffState] = field(init=False)
    parts: dict[tuple[int, int], set[int]] = field(default_factory=dict)  # flow → verified part numbers
    # Parts that wait for a slot, have one, or had one
    asked: set[tuple[int, int, int]] = field(default_factory=set)
    resent: set[tuple[int, int, int]] = field(default_factory=set)
    finish: handoff_pb2.Finish | None = None
    announced: dict[FlowKey, int] = field(default_factory=dict)  # parts of each flow, from Finish
    finish_received: float = 0.0
    committing: bool = False
    discard: bool = False  # the peer says that its computation failed
    under_way: int = 0  # slots granted, nothing landed yet
    bytes: int = 0
    reserved: float = field(default_factory=time.monotonic)
    first_part: float = 0.0
    last_part: float = 0.0

    def __post_init__(self) -> None:
        self.machine = StateMachine(H.RESERVED, TRANSITIONS, "hand-off")
        self._commit_ended = asyncio.Event()
        held, tokens = self.reservation.held_tokens, self.spec.token_count
        self._coverage = Coverage(self.flows, self.num_layers, held, tokens)
        self._max_parts = MAX_PARTS_PER_ROW * self.num_layers * tokens

    def commit_ended(self) -> None:
        """Well or not: the machine says."""
        self.committing = False
        self._commit_ended.set()

    async def ends_committed(self) -> bool:
        """Waits while the engine is asked to commit: it answers after its step, or it has failed and its worker ends."""
        if self.committing:
            await self._commit_ended.wait()
        return self.machine.state is H.COMMITTED

    def refused_part(self, request: handoff_pb2.SlotRequest, slot_bytes: int) -> TransportError | None:
        """The error if the requested part cannot belong to this hand-off, else None."""
        key = (request.source_rank, request.target_rank)
        if key not in self._coverage.flows:
            return TransportError(f"rank {key[0]} ships nothing to rank {key[1]}", field="source_rank")
        if request.part >= self._max_parts:
            limit = str(self._max_parts)
            return TransportError(f"part {request.part} is beyond the limit", field="part", limit=limit)
        if request.bytes > slot_bytes:
            limit = str(slot_bytes)
            return TransportError(f"a part of {request.bytes} bytes", field="slot_bytes", limit=limit)
        if self.finish is not None and request.part >= self.announced[key]:
            return untrue(f"{self.announced[key]} parts, and a slot is asked for part {request.part}")
        return None

    def first_asked(self, request: handoff_pb2.SlotRequest) -> bool:
        """Of one said twice the second slot would never be written to, and never be free."""
        key = (request.source_rank, request.target_rank, request.part)
        known = key in self.asked
        self.asked.add(key)
        return not known

    def take_resend(self, part: PartLanded) -> bool:
        """Of a part that arrived corrupted: once it is sent again, in a slot of its own. False: it was before."""
        key = (part.source_rank, part.rank, part.part)
        if key in self.resent:
            return False
        self.resent.add(key)
        self.asked.discard(key)
        return True

    def part_verified(self, part: PartLanded) -> bool:
        """False if it was here already."""
        key = (part.source_rank, part.rank)
        seen = self.parts.setdefault(key, set())
        if part.part in seen:
            return False
        seen.add(part.part)
        self._coverage.add(key, part.layers, part.tokens)
        self.bytes += part.bytes
        self.last_part = time.monotonic()
        return True

    @property
    def rate_bytes_per_second(self) -> float:
        """0: too little was shipped to tell."""
        seconds = self.last_part - self.first_part
        return self.bytes / seconds if self.bytes and seconds > 0 else 0.0

    def committed(self, began: float) -> handoff_pb2.Committed:
        """What the prefill worker is told; the commit `began` when nothing was missing any more."""
        return handoff_pb2.Committed(
            transfer_id=self.spec.transfer_id,
            exposed_seconds=max(0.0, (self.last_part or self.finish_received) - self.finish_received),
            commit_seconds=time.monotonic() - began,
        )

    def take_finish(self, finish: handoff_pb2.Finish) -> None:
        """Store the announced part counts. Raises TransportError if they contradict what is known already."""
        self.finish, self.finish_received = finish, time.monotonic()
        self.announced = dict.fromkeys(self._coverage.flows, 0)
        named: set[FlowKey] = set()
        for flow in finish.flows:
            key = (flow.source_rank, flow.target_rank)
            if key in named or key not in self.announced:
                raise untrue(f"parts from rank {key[0]} to {key[1]}, which is no flow, or was named before")
            named.add(key)
            self.announced[key] = flow.parts
        for source, target, part in self.asked:
            if part >= self.announced[source, target]:
                raise untrue(f"{self.announced[source, target]} parts, and part {part} has a slot")

    @property
    def complete(self) -> bool:
        """Finish has come, and every flow has the parts it names."""
        return self.finish is not None and all(
            len(self.parts.get(key, ())) == count for key, count in self.announced.items()
        )

    @property
    def covered(self) -> bool:
        """Whether every token to be shipped has landed in every layer of every flow."""
        return self._coverage.whole

    @property
    def verified_tokens(self) -> int:
        """Leading tokens that are whole: held, or verified for every layer and rank. None, if they may be wrong."""
        return 0 if self.discard else self._coverage.leading_tokens


def untrue(claim: str) -> TransportError:
    return TransportError(f"Finish is not true: it names {claim}", field="finish")


def error_of(part: PartLanded, digests: str, digest_kind: str) -> BatonError:
    """The error with which a refused part ends its attempt. `digests` and `digest_kind` are the pair's."""
    if part.error == "digest":
        return DigestMismatchError(f"part {part.part} arrived corrupted twice")
    if part.error == "digest_missing":
        return TransportError(
            f"part {part.part} has no {digest_kind} digest, as was agreed ({digests}): give prefill and decode "
            "workers the same digests and digest_sample_share",
            field="digests",
        )
    return TransportError(f"part {part.part} could not be taken ({part.error})")


def as_baton_error(error: Exception) -> BatonError:
    """What the peer is told; a fault of ours is logged."""
    if isinstance(error, BatonError):
        return error
    log.error("a hand-off failed", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")
