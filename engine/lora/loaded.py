"""The adapters that an engine has loaded, by digest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from cluster.errors import AdapterMissingError, AdapterSlotsError, InvalidRequestError
from engine.lora.adapter_files import Adapter


class AdapterRunner(Protocol):
    @property
    def adapter_slots(self) -> int:
        """Adapters that may be loaded at a time."""

    def read_adapter(self, directory: Path) -> Adapter:
        """Any thread. Raises ModelError."""

    def write_adapter(self, slot: int, adapter: Adapter) -> None:
        """On every rank. Raises ModelError if one of them does not read the same adapter."""


class LoadedAdapters:
    """On the engine's thread, except `digests`."""

    def __init__(self, runner: AdapterRunner):
        self._runner = runner
        self.slots: dict[str, int] = {}  # from 1 on
        self._leaving: set[str] = set()

    @property
    def digests(self) -> Mapping[str, int]:
        """Any thread."""
        return dict(self.slots)

    def check(self, digest: str) -> None:
        """Raises AdapterMissingError if a request's adapter is not loaded."""
        if digest and (digest not in self.slots or digest in self._leaving):
            raise AdapterMissingError(f"adapter {digest[:64]} is not loaded here", field="adapter")

    def load(self, adapter: Adapter) -> None:
        """Nothing changes if it is loaded already. Raises AdapterSlotsError if no slot is free, or ModelError."""
        self._leaving.discard(adapter.digest)
        if adapter.digest in self.slots:
            return
        total, taken = self._runner.adapter_slots, set(self.slots.values())
        slot = next((one for one in range(1, total + 1) if one not in taken), None)
        if slot is None:
            raise AdapterSlotsError(
                f"{len(taken)} adapters are loaded, as many as max_loras allows: unload one",
                field="max_loras",
                limit=str(total),
            )
        self._runner.write_adapter(slot, adapter)
        self.slots[adapter.digest] = slot

    def unload(self, digest: str, in_use: bool) -> None:
        """Free its slot. Raises InvalidRequestError while requests use it; new ones are refused from now on."""
        if digest in self.slots:
            self._leaving.add(digest)
        if in_use:
            raise InvalidRequestError(f"adapter {digest[:64]} is in use", field="adapter")
        self.slots.pop(digest, None)
        self._leaving.discard(digest)
