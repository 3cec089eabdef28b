"""Verifies a part that lies in its slot against what was announced, and scatters it into the KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from cluster.errors import ConfigError
from cluster.faults.points import Act, FaultPoint
from kv_transfer import messages as m
from kv_transfer.device.base import Mark, PartCopier, Pending
from kv_transfer.layout.conversion import Conversion
from kv_transfer.layout.digest import NONE, Digests
from kv_transfer.layout.rows import CacheRegion
from kv_transfer.transports.registry import Endpoints
from wire import handoff_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpectedTransfer:
    message: m.ExpectTransfer
    digests: Digests
    reserved: Mark  # until it is reached, the engine may use the blocks for the request that had them last


class Expectations:
    """The parts that a receiving rank expects, by slot; a part that does not match is stale."""

    def __init__(self, copier: PartCopier, sample_share: float, decode_epoch: int):
        self._copier = copier
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
        kind = message.digest_kind or self._copier.digest_kinds[0]
        digests = Digests(message.digests, self._sample_share, kind)
        self._transfers[message.transfer_id] = ExpectedTransfer(message, digests, self._copier.mark())

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
    row_bytes: int  # bytes of one token in one head of one layer, K or V, in a part
    first_head: int  # this rank's first KV head, counted over the whole model
    slot_bytes: int

    @classmethod
    def of(
        cls, kv_cache: Tensor, first_head: int, slot_bytes: int, conversion: Conversion | None = None
    ) -> Self:
        """Raises ConfigError if a slot is too short for any part."""
        _, num_layers, _, num_heads, page_size, row = kv_cache.shape
        row_bytes = row * kv_cache.element_size() if conversion is None else conversion.row_bytes
        check_slot_bytes(slot_bytes, 2 * num_heads * page_size * row_bytes)
        return cls(num_layers, page_size, row_bytes, first_head, slot_bytes)

    def region(
        self, header: handoff_pb2.PartHeader, transfer: m.ExpectTransfer, source_rank: int
    ) -> CacheRegion | None:
        """The region of a part, or None if the header does not fit.

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
        return CacheRegion(
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

    def __init__(self, slot_bytes: int, copier: PartCopier, endpoints: Endpoints):
        self.slots: list[Tensor] = []  # uint8 [slot_bytes] each
        self._slot_bytes = slot_bytes
        self._copier = copier
        self._endpoints = endpoints

    def add_segment(self, slots: int) -> list[int]:
        """Addresses of the new slots."""
        memory = self._copier.allocate(slots * self._slot_bytes)
        self._endpoints.register(memory)
        added = list(memory.view(slots, self._slot_bytes))
        self.slots += added
        return [slot.data_ptr() for slot in added]


@dataclass(eq=False)
class LandingPart:
    """A part from its arrival to its outcome.

    arrived ─► (filled) ─► digest ─► scatter ─► outcome
    """

    header: handoff_pb2.PartHeader
    transfer: ExpectedTransfer
    payload: bytes | None  # its bytes, if they are not in the slot yet
    number: int = 0  # in the order of arrival
    region: CacheRegion | None = None  # once it is checked
    digest: Pending[bytes] | None = None
    scatter: Pending[bool] | None = None
    # Of a part that was given up: reached once what was enqueued until then has ended.
    ending: Mark | None = None
    outcome: str | None = None  # "" = verified and scattered, or the reason why not; None = neither yet

    @property
    def has_ended(self) -> bool:
        """Whether the device has ended all work on it."""
        return all(
            one is None or one.result() is not None for one in (self.digest, self.scatter, self.ending)
        )


@dataclass(eq=False, kw_only=True)
class PartLanding:
    rank: int
    copier: PartCopier
    shape: CacheShape
    memory: SlotMemory
    poll: Callable[[], None]  # drives the transports' progress
    at_landed: FaultPoint

    def advance(self, part: LandingPart) -> bool:
        """Take a part as far as possible without waiting; return whether it has its outcome.

        Raises only what the device reports about itself: the thread serves all hand-offs.
        """
        try:
            part.outcome = self._next(part)
        except Exception:
            header = part.header
            log.exception(
                "part %d of hand-off %s could not be scattered", header.part, header.transfer_id.hex()
            )
            self.give_up(part)
            part.outcome = self._next(part)
        return part.outcome is not None

    def give_up(self, part: LandingPart) -> None:
        """Enqueue nothing more for a part. Its slot and its blocks are in use until it has its outcome."""
        part.ending = part.ending or self.copier.enqueued()

    def _next(self, part: LandingPart) -> str | None:
        """The outcome, or None while the device works on the part or has no free buffer."""
        if part.ending is not None:
            return "failed" if part.has_ended else None
        if part.region is None and (problem := self._arrive(part)) != "":
            return problem
        return self._land(part)

    def _arrive(self, part: LandingPart) -> str | None:
        """Check a part and copy its bytes into its slot; "" once both are done, a reason if the check fails, else None."""
        header = part.header
        region = self.shape.region(header, part.transfer.message, header.source_rank)
        if region is None or not self._fits(part):
            return "geometry"
        if not self._has_agreed_digest(header, part.transfer.digests):
            return "digest_missing"
        slot = self.memory.slots[header.slot]
        if part.payload is not None and not self.copier.fill(slot, part.payload):
            return None
        part.region, part.payload = region, None
        fault = self.at_landed(header.transfer_id)
        if fault is not None and fault.act is Act.CORRUPT:
            slot[0] ^= 0xFF
        return ""

    def _fits(self, part: LandingPart) -> bool:
        """Refuse a payload of any other length: the rest of the slot would be an earlier part's bytes."""
        size = part.header.bytes
        return part.payload is None or 0 < len(part.payload) == size <= self.shape.slot_bytes

    def _has_agreed_digest(self, header: handoff_pb2.PartHeader, digests: Digests) -> bool:
        """A digest that the pair did not agree on is checked too."""
        agreed = digests.kind_of(header.transfer_id, header.source_rank, self.rank, header.part)
        return header.digest_kind in ((NONE, *self.copier.digest_kinds) if agreed == NONE else (agreed,))

    def _land(self, part: LandingPart) -> str | None:
        """Verify a part that is in its slot, then scatter it."""
        header = part.header
        data = self.memory.slots[header.slot][: header.bytes]
        if part.scatter is None:
            part.digest = part.digest or self.copier.digest(data, header.digest_kind)
            found = part.digest.result() if part.digest is not None else None
            if found is None:
                return None
            if found != header.digest:
                return "digest"
            # The peer's next write completes, and its notification is sent, only when this side polls.
            self.poll()
            assert part.region is not None, "it was checked"
            part.scatter = self.copier.scatter(data, part.region, part.transfer.reserved)
        return "" if part.scatter is not None and part.scatter.result() else None
