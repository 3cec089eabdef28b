"""One hand-off at the decode worker: what has arrived, and what is still missing."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.errors import BatonError, InternalError
from cluster.state_machine import StateMachine
from kv_transfer.base import HandoffSpec, HandoffState, Reservation
from kv_transfer.geometry import Flow
from kv_transfer.messages import PartLanded
from wire import handoff_pb2

log = logging.getLogger(__name__)
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
    asked: set[tuple[int, int, int]] = field(
        default_factory=set
    )  # parts that have, or wait for, a slot, or had one
    resent: set[tuple[int, int, int]] = field(default_factory=set)
    finish: handoff_pb2.Finish | None = None
    finish_received: float = 0.0
    committing: bool = False
    under_way: int = 0  # slots granted, nothing landed yet
    bytes: int = 0
    reserved: float = field(default_factory=time.monotonic)
    first_part: float = 0.0
    last_part: float = 0.0

    def __post_init__(self) -> None:
        self.machine = StateMachine(H.RESERVED, TRANSITIONS, "hand-off")
        self._commit_ended = asyncio.Event()
        # Layers verified, per flow and token: the bitmap that says what may be kept after an abort.
        self._layers: dict[tuple[int, int], NDArray[np.int32]] = {
            (flow.source_rank, flow.target_rank): np.zeros(self.spec.token_count, dtype=np.int32)
            for flow in self.flows
        }

    def commit_ended(self) -> None:
        """Well or not: the machine says."""
        self.committing = False
        self._commit_ended.set()

    async def ends_committed(self) -> bool:
        """Waits while the engine is asked to commit: it answers after its step, or it has failed and its worker ends."""
        if self.committing:
            await self._commit_ended.wait()
        return self.machine.state is H.COMMITTED

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
        if part.part in seen or key not in self._layers:
            return False
        seen.add(part.part)
        self._layers[key][part.tokens[0] : part.tokens[1]] += part.layers[1] - part.layers[0]
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

    @property
    def complete(self) -> bool:
        """Finish has come, and every flow has the parts it names."""
        if self.finish is None:
            return False
        announced = {(flow.source_rank, flow.target_rank): flow.parts for flow in self.finish.flows}
        return all(len(self.parts.get(key, ())) == count for key, count in announced.items())

    @property
    def covered(self) -> bool:
        """Every token that had to be shipped is here in every layer from every flow: Finish told the truth."""
        held = self.reservation.held_tokens
        return all(bool((layers[held:] == self.num_layers).all()) for layers in self._layers.values())

    @property
    def verified_tokens(self) -> int:
        """Leading tokens that are whole: held, or verified for every layer and rank."""
        whole = self.spec.token_count
        for layers in self._layers.values():
            missing = np.flatnonzero(layers[self.reservation.held_tokens :] < self.num_layers)
            if missing.size:
                whole = min(whole, self.reservation.held_tokens + int(missing[0]))
        return whole


def as_baton_error(error: Exception) -> BatonError:
    """What the peer is told; a fault of ours is logged."""
    if isinstance(error, BatonError):
        return error
    log.error("a commit failed", exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")
