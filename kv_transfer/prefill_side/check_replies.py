"""Validates the decode worker's messages on a pair's control stream.

An invalid Welcome ends the stream, because it decides what the pair does. An invalid grant or result ends its hand-off.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import StaleEpochError, TransportError
from kv_transfer.layout.compatibility import can_share_heads, check_layouts
from kv_transfer.layout.digest import MODES
from kv_transfer.messages import Granted
from wire import common_pb2, handoff_pb2


def check_welcome(
    welcome: handoff_pb2.Welcome,
    decode: common_pb2.WorkerRef,
    layout: common_pb2.KvLayout,
    transports: Sequence[str],
    digest_kinds: Sequence[str],
) -> None:
    """Check Welcome against `layout`, `transports` and `digest_kinds` of our Hello. Raises HandoffError with the field."""
    if welcome.decode_epoch != decode.epoch:
        raise StaleEpochError(
            f"{decode.worker_id} has another epoch now; read its registration again",
            field="decode_epoch",
        )
    check_layouts(layout, welcome.layout)
    if not can_share_heads(welcome.layout):
        ranks, heads = welcome.layout.tensor_parallel, welcome.layout.num_kv_heads
        raise _wrong("layout.tensor_parallel", f"{ranks} ranks can't share {heads} heads")
    if welcome.transport not in transports:
        raise _wrong("transport", f"{welcome.transport!r} was not offered ({', '.join(transports)})")
    if not welcome.slot_bytes:
        raise _wrong("slot_bytes", "must be at least 1")
    if welcome.digests not in ("", *MODES):
        raise _wrong("digests", f"{welcome.digests!r} is not one of {', '.join(MODES)}")
    if welcome.digest_kind not in ("", *digest_kinds):
        raise _wrong("digest_kind", f"{welcome.digest_kind!r} was not offered ({', '.join(digest_kinds)})")


def read_grant(grant: handoff_pb2.SlotGrant, source_ranks: int, target_ranks: int) -> Granted:
    """Read a SlotGrant. Raises TransportError naming the field."""
    check_ranks(grant.source_rank, grant.target_rank, source_ranks, target_ranks)
    return Granted(
        transfer_id=grant.transfer_id,
        target_rank=grant.target_rank,
        part=grant.part,
        slot=grant.slot,
        generation=grant.generation,
        address=grant.address,
        device=grant.device,
        deadline_seconds=grant.deadline_seconds,
    )


def check_ranks(source_rank: int, target_rank: int, source_ranks: int, target_ranks: int) -> None:
    """Check the rank numbers of a grant or a result. Raises TransportError naming the field."""
    if source_rank >= source_ranks:
        raise _wrong("source_rank", f"{source_rank} of {source_ranks}")
    if target_rank >= target_ranks:
        raise _wrong("target_rank", f"{target_rank} of {target_ranks}")


def _wrong(field: str, message: str) -> TransportError:
    return TransportError(f"{field}: {message}", field=field)
