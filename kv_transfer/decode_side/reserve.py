"""Begins a hand-off at the decode worker: checks first, then reserves blocks, then tells the ranks.

If any step fails, everything reserved so far is released.
"""

from __future__ import annotations

from kv_transfer.contract import DecodeEngine, HandoffSpec
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
    spec = HandoffSpec.of(request)
    flows = plan_flows(
        layout.num_kv_heads, link.layout.tensor_parallel, layout.tensor_parallel, spec.transfer_id
    )
    reservation = await engine.reserve(spec)
    try:
        handoff = IncomingHandoff(
            spec=spec,
            reservation=reservation,
            peer=link.name,
            prefill_epoch=link.prefill.epoch,
            flows=flows,
            num_layers=layout.num_layers,
        )
        landing.expect_transfer(handoff, link.digests, link.digest_kind)
    except BaseException:
        landing.forget(spec.transfer_id)
        await engine.abort(spec.transfer_id, 0)
        raise
    return handoff
