"""Whether KV of one layout can be moved into another, compared field by field."""

from __future__ import annotations

from cluster.errors import LayoutMismatchError
from wire import common_pb2

MAX_RANKS = 1024
# TP degrees may differ: heads are re-sharded on the way.
_MUST_EQUAL = ("wire_version", "model_id", "dtype", "page_size", "num_layers", "num_kv_heads", "head_dim")


def check_layouts(prefill: common_pb2.KvLayout, decode: common_pb2.KvLayout) -> None:
    """Raises LayoutMismatchError naming the field."""
    for field in _MUST_EQUAL:
        theirs, ours = getattr(prefill, field), getattr(decode, field)
        if theirs != ours:
            raise LayoutMismatchError(
                f"KV can't be handed over: {field} is {theirs!r} at the prefill worker, {ours!r} at the decode worker",
                field=field,
            )


def can_share_heads(layout: common_pb2.KvLayout) -> bool:
    """Whether every rank holds the same number of KV heads, or every head is held by the same number of ranks."""
    ranks, heads = layout.tensor_parallel, layout.num_kv_heads
    return 1 <= ranks <= MAX_RANKS and heads >= 1 and not (heads % ranks and ranks % heads)
