"""The parts of one hand-off at the decode worker: requested, verified, announced by Finish."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import TransportError
from kv_transfer.decode_side.coverage import Coverage, FlowKey
from kv_transfer.layout.geometry import Flow
from kv_transfer.messages import PartLanded
from wire import handoff_pb2

# A prompt that is preempted at the prefill worker is computed, and shipped, again.
MAX_PARTS_PER_ROW = 8  # a row: one token in one layer
PartKey = tuple[int, int, int]  # (source rank, target rank, part)


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
            return untrue(f"{self.announced[key]} parts, and a slot is requested for part {request.part}")
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
                raise untrue(f"parts from rank {key[0]} to {key[1]}, which is no flow, or was named before")
            named.add(key)
            announced[key] = flow.parts
        for source, target, part in self._asked:
            if part >= announced[source, target]:
                raise untrue(f"{announced[source, target]} parts, and part {part} has a slot")

    @property
    def complete(self) -> bool:
        """Whether Finish has come, and every flow has as many parts as it names."""
        return self.announced is not None and all(
            len(self._verified.get(key, ())) == count for key, count in self.announced.items()
        )


def untrue(claim: str) -> TransportError:
    return TransportError(f"Finish is not true: it names {claim}", field="finish")
