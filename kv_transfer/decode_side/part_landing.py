"""Verifies a part that lies in its slot, and scatters it into the KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from cluster.faults.points import Act, FaultPoint
from kv_transfer.decode_side.expectations import ExpectedTransfer
from kv_transfer.decode_side.fitting import CacheShape, Place
from kv_transfer.decode_side.slot_memory import SlotMemory
from kv_transfer.layout.digest import NONE, Digests, digest, kinds_on
from kv_transfer.layout.geometry import scatter, wait_copied
from wire import handoff_pb2

log = logging.getLogger(__name__)


class PartLanding:
    def __init__(
        self,
        *,
        rank: int,
        kv_cache: Tensor,
        shape: CacheShape,
        memory: SlotMemory,
        poll: Callable[[], None],
        at_landed: FaultPoint,
    ):
        """`poll` drives the transports' progress."""
        self._rank = rank
        self._cache = kv_cache
        self._shape = shape
        self._memory = memory
        self._poll = poll
        self._at_landed = at_landed

    def take(self, header: handoff_pb2.PartHeader, transfer: ExpectedTransfer, payload: bytes | None) -> str:
        """Verify and scatter a part; return "" or why that failed. `payload`: its bytes, if they are not in the slot yet.

        Raises nothing: the thread serves all hand-offs.
        """
        try:
            place = self._shape.place(header, transfer.message, header.source_rank)
            if place is None or (payload is not None and not self._fill(header, payload)):
                return "geometry"
            slot = self._memory.slots[header.slot]
            fault = self._at_landed(header.transfer_id)
            if fault is not None and fault.act is Act.CORRUPT:
                slot[0] ^= 0xFF
            data = slot[: header.bytes]
            if problem := self._unverified(header, transfer.digests, data):
                return problem
            self._scatter(data, place)
            return ""
        except Exception:
            log.exception(
                "part %d of hand-off %s could not be scattered", header.part, header.transfer_id.hex()
            )
            return "failed"

    def _fill(self, header: handoff_pb2.PartHeader, payload: bytes) -> bool:
        """Copy the bytes into the slot. Refuses any other length: the rest would be an earlier part's bytes."""
        if not 0 < len(payload) == header.bytes <= self._shape.slot_bytes:
            return False
        here = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._memory.slots[header.slot][: len(payload)].copy_(here)
        return True

    def _unverified(self, header: handoff_pb2.PartHeader, digests: Digests, data: Tensor) -> str:
        """Check the digest; return "" or why it fails. A digest that the pair did not agree on is checked too."""
        agreed = digests.kind_of(header.transfer_id, header.source_rank, self._rank, header.part)
        if header.digest_kind not in ((NONE, *kinds_on(data.device)) if agreed == NONE else (agreed,)):
            return "digest_missing"
        return "" if digest([data], header.digest_kind) == header.digest else "digest"

    def _scatter(self, data: Tensor, place: Place) -> None:
        # The peer's next write completes, and its notification is sent, only when this side polls.
        self._poll()
        cache = self._cache
        scatter(cache, data.view(cache.dtype), place.block_ids, place.layers, place.heads, place.tokens)
        wait_copied(cache)  # before the slot has another owner
