"""One hand-off at the decode worker: its reservation, its parts, its state, and what is counted of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.errors import BatonError, DigestMismatchError, InternalError, TransportError
from cluster.state_machine import StateMachine
from cluster.telemetry.histogram import Histogram
from cluster.telemetry.metrics import worker as metrics
from kv_transfer import messages as m
from kv_transfer.contract import DecodeEngine, HandoffState, Reservation
from kv_transfer.decode_side.landing import Landing
from kv_transfer.decode_side.part_ledger import PartLedger
from kv_transfer.decode_side.peer import PeerLink
from kv_transfer.layout.geometry import Flow, plan_flows
from kv_transfer.messages import PartLanded
from wire import common_pb2, handoff_pb2

log = logging.getLogger(__name__)
H = HandoffState
TRANSITIONS: dict[HandoffState, frozenset[HandoffState]] = {
    H.RESERVED: frozenset({H.RECEIVING, H.COMMITTED, H.ABORTED}),
    H.RECEIVING: frozenset({H.COMMITTED, H.ABORTED}),
}


@dataclass
class HandoffTimes:
    """On the monotonic clock; 0 = not yet."""

    reserved: float = field(default_factory=time.monotonic)
    first_part: float = 0.0  # granted
    last_part: float = 0.0  # verified
    finish: float = 0.0

    @property
    def exposed_seconds(self) -> float:
        """From Finish to the last part."""
        return max(0.0, (self.last_part or self.finish) - self.finish)


class IncomingHandoff:
    def __init__(
        self,
        reserve: handoff_pb2.Reserve,
        reservation: Reservation,
        link: PeerLink,
        flows: Sequence[Flow],
        num_layers: int,
    ):
        self.reserve = reserve
        self.reservation = reservation
        self.link = link
        self.flows = flows
        self.machine = StateMachine(H.RESERVED, TRANSITIONS, "hand-off")
        self.parts = PartLedger(flows, num_layers, reservation.held_tokens, reserve.token_count)
        self.times = HandoffTimes()
        self.finish: handoff_pb2.Finish | None = None
        self.committing = False
        self.under_way = 0  # slots granted in which nothing has landed
        self._discard = False
        self._commit_ended = asyncio.Event()

    @property
    def transfer_id(self) -> bytes:
        return self.reserve.transfer_id

    def granted(self) -> None:
        self.times.first_part = self.times.first_part or time.monotonic()
        self.under_way += 1

    def landed(self) -> None:
        self.under_way -= 1

    def part_verified(self, part: PartLanded) -> None:
        if self.parts.verified(part):
            self.times.last_part = time.monotonic()

    def take_finish(self, finish: handoff_pb2.Finish) -> None:
        """Store the announced part counts. Raises TransportError if they contradict earlier messages."""
        self.finish, self.times.finish = finish, time.monotonic()
        self.parts.announce(finish.flows)

    def discard(self) -> None:
        """The peer's computation has failed: none of its KV may be kept."""
        self._discard = True

    def begin_commit(self) -> None:
        self.committing = True

    def end_commit(self) -> None:
        """The commit has succeeded or failed; see the state."""
        self.committing = False
        self._commit_ended.set()

    async def ends_committed(self) -> bool:
        """Wait for the engine's answer to a commit in progress; returns whether the hand-off has committed."""
        if self.committing:
            await self._commit_ended.wait()
        return self.machine.state is H.COMMITTED

    @property
    def rate_bytes_per_second(self) -> float:
        """0 if too little was shipped to measure it."""
        seconds = self.times.last_part - self.times.first_part
        return self.parts.bytes / seconds if self.parts.bytes and seconds > 0 else 0.0

    @property
    def verified_tokens(self) -> int:
        """Leading tokens that are held, or verified for every layer and rank; 0 if they may be wrong."""
        return 0 if self._discard else self.parts.coverage.leading_tokens


def error_of(part: PartLanded, agreement: handoff_pb2.Welcome) -> BatonError:
    """The error with which a refused part ends its attempt."""
    if part.error == "digest":
        return DigestMismatchError(f"part {part.part} arrived corrupted twice")
    if part.error == "digest_missing":
        return TransportError(
            f"part {part.part} lacks the {agreement.digest_kind} digest that the pair agreed on (digests: "
            f"{agreement.digests}): give prefill and decode workers the same digests and digest_sample_share",
            field="digests",
        )
    return TransportError(f"part {part.part} could not be taken ({part.error})")


def as_baton_error(error: Exception, transfer_id: bytes) -> BatonError:
    """The error for the peer; an unexpected one is logged."""
    if isinstance(error, BatonError):
        return error
    log.error("hand-off %s failed", transfer_id.hex(), exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")


ASSUMED_RATE = 500e6  # bytes per second, before the first part was measured


@dataclass
class ReceiverStats:
    counts: Counter[str] = field(default_factory=Counter)
    handoff_seconds: Histogram = field(default_factory=metrics.HANDOFF_SECONDS.create)
    rate_bytes_per_second: float = ASSUMED_RATE

    def part_verified(self, part: PartLanded) -> None:
        self.counts["parts"] += 1
        self.counts["bytes"] += part.bytes

    def committed(self, handoff: IncomingHandoff) -> None:
        self.counts["committed"] += 1
        measured = handoff.rate_bytes_per_second or self.rate_bytes_per_second
        self.rate_bytes_per_second += 0.2 * (measured - self.rate_bytes_per_second)
        self.handoff_seconds.observe(time.monotonic() - handoff.times.reserved)


async def accept(
    link: PeerLink,
    request: handoff_pb2.Reserve,
    *,
    layout: common_pb2.KvLayout,
    engine: DecodeEngine,
    landing: Landing,
) -> IncomingHandoff:
    """Reserve blocks and register the hand-off. Re-raises any failure after releasing what was reserved."""
    flows = plan_flows(
        layout.num_kv_heads, link.layout.tensor_parallel, layout.tensor_parallel, request.transfer_id
    )
    reservation = await engine.reserve(request)
    try:
        handoff = IncomingHandoff(request, reservation, link, flows, layout.num_layers)
        landing.expect_transfer(
            m.ExpectTransfer(
                transfer_id=request.transfer_id,
                prefill_epoch=link.prefill.epoch,
                block_ids=reservation.block_ids,
                held_tokens=reservation.held_tokens,
                token_count=request.token_count,
                flows=flows,
                digests=link.agreement.digests,
                digest_kind=link.agreement.digest_kind,
            )
        )
    except BaseException:
        landing.forget(request.transfer_id)
        await engine.abort(request.transfer_id, 0)
        raise
    return handoff
