"""The registered memory of a rank's landing ring."""

from __future__ import annotations

import torch
from torch import Tensor

from kv_transfer.memory import aligned_bytes
from kv_transfer.transports.registry import Endpoints


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
