"""Which KV of a hand-off is here: a bitmap over (flow, layer, token). A flow's heads always come together: a part that
has other heads than its flow is refused before it is counted here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_transfer.geometry import Flow

FlowKey = tuple[int, int]  # (source rank, target rank)


class Coverage:
    """Tokens [held_tokens, token_count) are shipped; those before are here already."""

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
        """What is here already counts once. The ranges lie within what is shipped."""
        part = self._here[flow][slice(*layers), tokens[0] - self._held : tokens[1] - self._held]
        self._missing -= part.size - int(np.count_nonzero(part))
        part[:] = True

    @property
    def whole(self) -> bool:
        """Every token, in every layer, from every flow."""
        return self._missing == 0

    @property
    def leading_tokens(self) -> int:
        """Tokens before the first of which anything is missing, held ones included."""
        shipped = min((_leading(here) for here in self._here.values()), default=0)
        return self._held + shipped


def _leading(here: NDArray[np.bool_]) -> int:
    """Columns before the first that has a gap."""
    gaps = np.flatnonzero(~np.logical_and.reduce(here, axis=0))
    return int(gaps[0]) if gaps.size else here.shape[1]
