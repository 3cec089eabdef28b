"""Checks a part's header against the reservation before anything of the part is written into KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from cluster.errors import ConfigError
from kv_transfer import messages as m
from wire import handoff_pb2


def check_slot_bytes(slot_bytes: int, least: int) -> None:
    """Raise ConfigError if a slot is shorter than `least`, the bytes of one layer of one block: the smallest part."""
    if slot_bytes < least:
        raise ConfigError(
            f"transfer.slot_bytes is {slot_bytes}, but one layer of one block, the smallest part, has {least} bytes: set "
            "at least that, rounded up to a multiple of 256",
            field="transfer.slot_bytes",
        )


@dataclass(frozen=True)
class Place:
    """Where a part goes in this rank's cache. `heads` are indices of the rank, `block_ids` those of `tokens`."""

    layers: range
    heads: range
    tokens: range
    block_ids: Sequence[int]


@dataclass(frozen=True)
class CacheShape:
    num_layers: int
    page_size: int
    row_bytes: int  # bytes of one token in one head of one layer, K or V
    first_head: int  # this rank's first KV head, counted over the whole model
    slot_bytes: int

    @classmethod
    def of(cls, kv_cache: Tensor, first_head: int, slot_bytes: int) -> Self:
        """Raises ConfigError if a slot is too short for any part."""
        _, num_layers, _, num_heads, page_size, head_dim = kv_cache.shape
        row_bytes = head_dim * kv_cache.element_size()
        check_slot_bytes(slot_bytes, 2 * num_heads * page_size * row_bytes)
        return cls(num_layers, page_size, row_bytes, first_head, slot_bytes)

    def place(
        self, header: handoff_pb2.PartHeader, transfer: m.ExpectTransfer, source_rank: int
    ) -> Place | None:
        """The place of a part, or None if the header does not fit.

        It does not fit if its heads are not its flow's, its tokens or layers are not all to be shipped, or its size does
        not follow from its ranges.
        """
        heads = (header.head_begin, header.head_end)
        layers = (header.layer_begin, header.layer_end)
        tokens = (header.token_begin, header.token_end)
        if (
            heads not in [(f.head_begin, f.head_end) for f in transfer.flows if f.source_rank == source_rank]
            or not 0 <= layers[0] < layers[1] <= self.num_layers
            or not transfer.held_tokens <= tokens[0] < tokens[1] <= transfer.token_count
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
            block_ids=transfer.block_ids[tokens[0] // page : -(-tokens[1] // page)],
        )

    @staticmethod
    def _span(ends: tuple[int, int]) -> int:
        return ends[1] - ends[0]
