"""The decode worker's messages about one hand-off."""

from __future__ import annotations

from cluster.errors import BatonError, StaleTransferError
from kv_transfer.decode_side.ring import IncomingPart, Slot
from kv_transfer.messages import PartLanded
from wire.handoff_pb2 import (
    Aborted,
    Committed,
    DecodeToPrefill,
    DrainedAck,
    PartResult,
    ProbeResult,
    SlotGrant,
)


def slot_grant(part: IncomingPart, slot: Slot, rank: int, device: int, deadline_seconds: float) -> SlotGrant:
    return SlotGrant(
        transfer_id=part.transfer_id,
        source_rank=part.source_rank,
        target_rank=rank,
        part=part.number,
        slot=slot.index,
        generation=slot.generation,
        address=slot.address,
        device=device,
        deadline_seconds=deadline_seconds,
    )


def part_result(part: PartLanded, verified: bool) -> DecodeToPrefill:
    return DecodeToPrefill(
        part_result=PartResult(
            transfer_id=part.transfer_id,
            source_rank=part.source_rank,
            target_rank=part.rank,
            part=part.part,
            verified=verified,
        )
    )


def committed(transfer_id: bytes, exposed_seconds: float, commit_seconds: float) -> DecodeToPrefill:
    return DecodeToPrefill(
        committed=Committed(
            transfer_id=transfer_id, exposed_seconds=exposed_seconds, commit_seconds=commit_seconds
        )
    )


def aborted(transfer_id: bytes, error: BatonError) -> DecodeToPrefill:
    return DecodeToPrefill(aborted=Aborted(transfer_id=transfer_id, error=error.to_wire()))


def already_ended(transfer_id: bytes) -> DecodeToPrefill:
    """To a message of a hand-off that has ended here."""
    return aborted(transfer_id, StaleTransferError("the hand-off has ended", field="transfer_id"))


def probe_arrived() -> DecodeToPrefill:
    return DecodeToPrefill(probe_result=ProbeResult(arrived=True))


def drained_ack(transfer_id: bytes) -> DecodeToPrefill:
    return DecodeToPrefill(drained_ack=DrainedAck(transfer_id=transfer_id))
