"""Begins a hand-off at the decode worker: checks first, then reserves blocks, then informs the ranks."""

from __future__ import annotations

from kv_transfer import messages as m
from kv_transfer.contract import DecodeEngine
from kv_transfer.decode_side.incoming import IncomingHandoff
from kv_transfer.decode_side.landing import Landing
from kv_transfer.decode_side.peer import PeerLink
from kv_transfer.layout.geometry import plan_flows
from wire import common_pb2, handoff_pb2


async def take_on(
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
