"""The parts of one hand-off at the decode worker: requested, verified, announced by Finish."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.errors import TransportError
from kv_transfer.layout.geometry import Flow
from kv_transfer.messages import PartLanded
from wire import handoff_pb2

# A prompt that is preempted at the prefill worker is computed, and shipped, again.
MAX_PARTS_PER_ROW = 8  # a row: one token in one layer
PartKey = tuple[int, int, int]  # (source rank, target rank, part)
FlowKey = tuple[int, int]  # (source rank, target rank)


class Coverage:
    """Which KV of a hand-off has landed: a bitmap over (flow, layer, token). Heads need no dimension: a part carries all
    heads of its flow, or is refused before it is counted.

    Tokens [held_tokens, token_count) are shipped; earlier ones are in the prefix cache.
    """

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


class PartLedger:
    def __init__(self, flows: Sequence[Flow], num_layers: int, held_tokens: int, token_count: int):
        """Tokens [held_tokens, token_count) are shipped."""
        self.coverage = Coverage(flows, num_layers, held_tokens, token_count)
        self.announced: dict[FlowKey, int] | None = None  # parts of each flow, from Finish
        self.bytes = 0  # verified
        self._max_parts = MAX_PARTS_PER_ROW * num_layers * token_count
        self._asked: set[PartKey] = set()  # parts that wait for a slot, have one, or had one
        self._resent: set[PartKey] = set()
        self._verified: dict[FlowKey, set[int]] = {}

    def refused(self, request: handoff_pb2.SlotRequest, slot_bytes: int) -> TransportError | None:
        """The error if the requested part cannot belong to this hand-off, else None."""
        key = (request.source_rank, request.target_rank)
        if key not in self.coverage.flows:
            return TransportError(f"rank {key[0]} ships nothing to rank {key[1]}", field="source_rank")
        if request.part >= self._max_parts:
            limit = str(self._max_parts)
            return TransportError(f"part {request.part} is beyond the limit", field="part", limit=limit)
        if request.bytes > slot_bytes:
            limit = str(slot_bytes)
            return TransportError(f"a part of {request.bytes} bytes", field="slot_bytes", limit=limit)
        if self.announced is not None and request.part >= self.announced[key]:
            return contradiction(
                f"{self.announced[key]} parts, and a slot is requested for part {request.part}"
            )
        return None

    def first_asked(self, request: handoff_pb2.SlotRequest) -> bool:
        """Note a request. Returns False for a repeated one: its slot would never be written to, and never be free."""
        key = (request.source_rank, request.target_rank, request.part)
        known = key in self._asked
        self._asked.add(key)
        return not known

    def take_resend(self, part: PartLanded) -> bool:
        """Allow a corrupted part to be sent again, in another slot. Returns False if it was sent again before."""
        key = (part.source_rank, part.rank, part.part)
        if key in self._resent:
            return False
        self._resent.add(key)
        self._asked.discard(key)
        return True

    def verified(self, part: PartLanded) -> bool:
        """Count a part. Returns False if it was counted before."""
        key = (part.source_rank, part.rank)
        seen = self._verified.setdefault(key, set())
        if part.part in seen:
            return False
        seen.add(part.part)
        self.coverage.add(key, part.layers, part.tokens)
        self.bytes += part.bytes
        return True

    def announce(self, flows: Sequence[handoff_pb2.FlowParts]) -> None:
        """Store the part counts of Finish. Raises TransportError if they contradict earlier messages."""
        announced = self.announced = dict.fromkeys(self.coverage.flows, 0)
        named: set[FlowKey] = set()
        for flow in flows:
            key = (flow.source_rank, flow.target_rank)
            if key in named or key not in announced:
                raise contradiction(
                    f"parts from rank {key[0]} to {key[1]}, which is no flow, or was named before"
                )
            named.add(key)
            announced[key] = flow.parts
        for source, target, part in self._asked:
            if part >= announced[source, target]:
                raise contradiction(f"{announced[source, target]} parts, and part {part} has a slot")

    @property
    def complete(self) -> bool:
        """Whether Finish has come, and every flow has as many parts as it names."""
        return self.announced is not None and all(
            len(self._verified.get(key, ())) == count for key, count in self.announced.items()
        )


def contradiction(claim: str) -> TransportError:
    return TransportError(f"Finish contradicts the hand-off: it names {claim}", field="finish")
