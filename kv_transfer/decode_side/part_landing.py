"""Verifies a part that lies in its slot against what was announced, and scatters it into the KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from cluster.errors import ConfigError
from cluster.faults.points import Act, FaultPoint
from kv_transfer import messages as m
from kv_transfer.layout.digest import NONE, Digests, digest, kinds_on
from kv_transfer.layout.geometry import scatter, wait_copied
from kv_transfer.layout.rows import Place
from kv_transfer.memory import aligned_bytes
from kv_transfer.transports.registry import Endpoints
from wire import handoff_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpectedTransfer:
    message: m.ExpectTransfer
    digests: Digests


class Expectations:
    """What a receiving rank expects in which slot; a part that does not match is stale."""

    def __init__(self, device: torch.device, sample_share: float, decode_epoch: int):
        self._device = device
        self._sample_share = sample_share
        self._epoch = decode_epoch
        self._transfers: dict[bytes, ExpectedTransfer] = {}
        self._expected: dict[int, handoff_pb2.SlotGrant] = {}  # by slot

    def __bool__(self) -> bool:
        """Whether any part is expected."""
        return bool(self._expected)

    def __contains__(self, transfer_id: bytes) -> bool:
        return transfer_id in self._transfers

    def parts_of(self, transfer_id: bytes) -> int:
        return sum(expected.transfer_id == transfer_id for expected in self._expected.values())

    def expect_transfer(self, message: m.ExpectTransfer) -> None:
        digests = Digests(self._device, message.digests, self._sample_share, message.digest_kind)
        self._transfers[message.transfer_id] = ExpectedTransfer(message, digests)

    def expect(self, grant: handoff_pb2.SlotGrant) -> None:
        self._expected[grant.slot] = grant

    def forget(self, transfer_id: bytes) -> None:
        self._transfers.pop(transfer_id, None)
        for slot in [slot for slot, one in self._expected.items() if one.transfer_id == transfer_id]:
            del self._expected[slot]

    def new_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._expected.clear()
        self._transfers.clear()

    def take(self, header: handoff_pb2.PartHeader) -> ExpectedTransfer | None:
        """The part's transfer, if slot, generation, transfer, part, rank and epochs are the expected ones, else None. The
        part is expected once."""
        expected = self._expected.get(header.slot)
        transfer = self._transfers.get(header.transfer_id)
        if (
            expected is None
            or transfer is None
            or expected.generation != header.generation
            or expected.transfer_id != header.transfer_id
            or transfer.message.prefill_epoch != header.prefill_epoch
            or self._epoch != header.decode_epoch
            or expected.part != header.part
            or expected.source_rank != header.source_rank
        ):
            return None
        del self._expected[header.slot]
        return transfer


def check_slot_bytes(slot_bytes: int, least: int) -> None:
    """Raise ConfigError if a slot is shorter than `least`, the bytes of one layer of one block: the smallest part."""
    if slot_bytes < least:
        raise ConfigError(
            f"transfer.slot_bytes is {slot_bytes}, but one layer of one block, the smallest part, has {least} bytes: set "
            "at least that, rounded up to a multiple of 256",
            field="transfer.slot_bytes",
        )


@dataclass(frozen=True)
class CacheShape:
    """Checks a part's header against the reservation before anything of the part is written into KV blocks."""

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


class SlotMemory:
    """Slots of equal size, in segments: addresses never change, and more segments may be added."""

    def __init__(self, slot_bytes: int, device: torch.device, endpoints: Endpoints):
        self.slots: list[Tensor] = []  # uint8 [slot_bytes] each
        self._slot_bytes = slot_bytes
        self._device = device
        self._endpoints = endpoints

    def add_segment(self, slots: int) -> list[int]:
        """Addresses of the new slots."""
        memory = aligned_bytes(slots * self._slot_bytes, self._device)
        self._endpoints.register(memory)
        added = list(memory.view(slots, self._slot_bytes))
        self.slots += added
        return [slot.data_ptr() for slot in added]


@dataclass(eq=False, kw_only=True)
class PartLanding:
    rank: int
    kv_cache: Tensor
    shape: CacheShape
    memory: SlotMemory
    poll: Callable[[], None]  # drives the transports' progress
    at_landed: FaultPoint

    def take(self, header: handoff_pb2.PartHeader, transfer: ExpectedTransfer, payload: bytes | None) -> str:
        """Verify and scatter a part; return "" or why that failed. `payload`: its bytes, if they are not in the slot yet.

        Raises nothing: the thread serves all hand-offs.
        """
        try:
            place = self.shape.place(header, transfer.message, header.source_rank)
            if place is None or (payload is not None and not self._fill(header, payload)):
                return "geometry"
            slot = self.memory.slots[header.slot]
            fault = self.at_landed(header.transfer_id)
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
        if not 0 < len(payload) == header.bytes <= self.shape.slot_bytes:
            return False
        here = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self.memory.slots[header.slot][: len(payload)].copy_(here)
        return True

    def _unverified(self, header: handoff_pb2.PartHeader, digests: Digests, data: Tensor) -> str:
        """Check the digest; return "" or why it fails. A digest that the pair did not agree on is checked too."""
        agreed = digests.kind_of(header.transfer_id, header.source_rank, self.rank, header.part)
        if header.digest_kind not in ((NONE, *kinds_on(data.device)) if agreed == NONE else (agreed,)):
            return "digest_missing"
        return "" if digest([data], header.digest_kind) == header.digest else "digest"

    def _scatter(self, data: Tensor, place: Place) -> None:
        # The peer's next write completes, and its notification is sent, only when this side polls.
        self.poll()
        cache = self.kv_cache
        scatter(cache, data.view(cache.dtype), place)
        wait_copied(cache)  # before the slot has another owner
