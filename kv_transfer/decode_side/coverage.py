"""Which KV of a hand-off has landed: a bitmap over (flow, layer, token).

Heads need no dimension: a part carries all heads of its flow, or is refused before it is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_transfer.layout.geometry import Flow

FlowKey = tuple[int, int]  # (source rank, target rank)


class Coverage:
    """The bitmap of one hand-off. Tokens [held_tokens, token_count) are shipped; earlier ones are in the prefix cache."""

    def __init__(self, flows: Sequence[Flow], num_layers: int, held_tokens: int, token_count: int):
        self._held = held_tokens
        shape = (num_layers, max(0, token_count - held_tokens))
        self._here: dict[FlowKey, NDArray[np.bool_]] = {
            (flow.source_rank, flow.target_rank): np.zeros(shape, dtype=np.bool_) for flow in flows
        }
        self._missing = len(self._here) * shape[0] * shape[1]

    @property
    def flows(self) -> frozenset[FlowKey]:
        return frozenset(self._here)

    def add(self, flow: FlowKey, layers: tuple[int, int], tokens: tuple[int, int]) -> None:
        """Mark half-open ranges, which lie within the shipped ones, as landed; marking twice changes nothing."""
        part = self._here[flow][slice(*layers), tokens[0] - self._held : tokens[1] - self._held]
        self._missing -= part.size - int(np.count_nonzero(part))
        part[:] = True

    @property
    def whole(self) -> bool:
        """Whether every shipped token has landed in every layer of every flow."""
        return self._missing == 0

    @property
    def leading_tokens(self) -> int:
        """Number of leading tokens that are complete, held ones included."""
        shipped = min((_leading(here) for here in self._here.values()), default=0)
        return self._held + shipped


def _leading(here: NDArray[np.bool_]) -> int:
    """Number of columns before the first column with a gap."""
    gaps = np.flatnonzero(~np.logical_and.reduce(here, axis=0))
    return int(gaps[0]) if gaps.size else here.shape[1]
