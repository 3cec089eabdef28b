"""What a receiving rank expects in which slot; a part that does not match is stale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kv_transfer import messages as m
from kv_transfer.layout.digest import Digests
from wire import handoff_pb2


@dataclass(frozen=True)
class ExpectedTransfer:
    message: m.ExpectTransfer
    digests: Digests


class Expectations:
    def __init__(self, device: torch.device, sample_share: float, decode_epoch: int):
        self._device = device
        self._sample_share = sample_share
        self._epoch = decode_epoch
        self._transfers: dict[bytes, ExpectedTransfer] = {}
        self._expected: dict[int, m.Expect] = {}  # by slot

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

    def expect(self, message: m.Expect) -> None:
        self._expected[message.slot] = message

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
