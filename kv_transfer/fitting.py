"""Does a part belong where its header says? Checked before anything of it is written: the header is its sender's word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer import messages as m
from wire import handoff_pb2


@dataclass(frozen=True)
class Place:
    """Of a part in this rank's cache. `heads` are the rank's own, `block_ids` those of `tokens`."""

    layers: range
    heads: range
    tokens: range
    block_ids: Sequence[int]


@dataclass(frozen=True)
class CacheShape:
    num_layers: int
    page_size: int
    row_bytes: int  # of one token in one head of one layer, K or V
    first_head: int  # of the whole model
    slot_bytes: int

    def place(self, header: handoff_pb2.PartHeader, told: m.ExpectTransfer, source_rank: int) -> Place | None:
        """None for a part of other heads than its flow's, of held tokens, of tokens or layers that there are none of,
        or of another size than those make."""
        heads = (header.head_begin, header.head_end)
        layers = (header.layer_begin, header.layer_end)
        tokens = (header.token_begin, header.token_end)
        if (
            heads not in [(f.head_begin, f.head_end) for f in told.flows if f.source_rank == source_rank]
            or not 0 <= layers[0] < layers[1] <= self.num_layers
            or not told.held_tokens <= tokens[0] < tokens[1] <= told.token_count
        ):
            return None
        size = self._span(layers) * 2 * self._span(heads) * self._span(tokens) * self.row_bytes
        if header.bytes != size or size > self.slot_bytes:
            return None
        page = self.page_size
        return Place(
            layers=range(*layers),
            heads=range(heads[0] - self.first_head, heads[1] - self.first_head),
            tokens=range(*tokens),
            block_ids=told.block_ids[tokens[0] // page : -(-tokens[1] // page)],
        )

    @staticmethod
    def _span(ends: tuple[int, int]) -> int:
        return ends[1] - ends[0]
