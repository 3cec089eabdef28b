"""The adapters that an engine has loaded, by digest.

One that was released stays in its slot, for requests that began before, until another adapter needs the slot: it is
taken from the one released first that no request uses.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from cluster.errors import AdapterMissingError, AdapterSlotsError, DeadlineError

READ_SECONDS = 120.0  # for all ranks to read an adapter
ASK_SECONDS = 0.05  # between two questions whether they have


class AdapterRunner(Protocol):
    """All methods are short (engine/lora/rank_adapters.py)."""

    @property
    def count(self) -> int:
        """Adapters that may be loaded at a time."""

    def begin(self, directory: Path, below: Path | None = None, lane: int = 0) -> None: ...

    def digest(self, lane: int = 0) -> str | None: ...

    def write(self, slot: int, lane: int = 0) -> None: ...

    def drop(self, lane: int = 0) -> None: ...


class NoAdapters:
    """A runner without slots."""

    count = 0

    def begin(self, directory: Path, below: Path | None = None, lane: int = 0) -> None:
        raise AdapterSlotsError("there are no slots for adapters (max_loras)", field="max_loras", limit="0")

    def digest(self, lane: int = 0) -> str | None:
        return None

    def write(self, slot: int, lane: int = 0) -> None:
        raise AssertionError("there is no slot")

    def drop(self, lane: int = 0) -> None:
        return


class LoadedAdapters:
    """The loaded adapters and their slots. All methods are called on the engine's thread, except `digests`."""

    def __init__(self, runner: AdapterRunner):
        self._runner = runner
        self.slots: dict[str, int] = {}  # from 1 on
        self._released: dict[str, None] = {}  # in that order

    @property
    def digests(self) -> Mapping[str, int]:
        """Any thread."""
        return dict(self.slots)

    def check(self, digest: str) -> None:
        """Raises AdapterMissingError if a request's adapter is not loaded."""
        if digest and digest not in self.slots:
            raise AdapterMissingError(f"adapter {digest[:64]} is not loaded here", field="adapter")

    def begin(self, directory: Path, below: Path | None = None, lane: int = 0) -> None:
        """Begin to read an adapter on all ranks, beside the steps; one that leads out of `below` is refused. `lane`: of
        the readings that go on side by side (LANES of engine/lora/message.py); the methods below are about the same."""
        self._runner.begin(directory, below, lane)

    def read_digest(self, lane: int = 0) -> str | None:
        """The digest of what was read; None while a rank reads. Raises ModelError, UnavailableError."""
        return self._runner.digest(lane)

    def drop(self, lane: int = 0) -> None:
        """Give up what is read."""
        self._runner.drop(lane)

    def fits(self, digest: str, used: Collection[str]) -> bool:
        """Whether it is loaded, or has a slot. `used`: digests of adapters whose slots may not be taken."""
        return digest in self.slots or self._free_slot(used) is not None

    def write(self, digest: str, used: Collection[str] = (), lane: int = 0) -> None:
        """Load what was read, which has this digest, unless it is loaded already. Raises AdapterSlotsError if there is no
        slot. Nothing of what was read is kept, whatever happens."""
        self._released.pop(digest, None)
        if digest in self.slots:
            self._runner.drop(lane)
            return
        slot = self._free_slot(used)
        if slot is None:
            self._runner.drop(lane)
            raise self._no_slot()
        for former in [one for one, of in self.slots.items() if of == slot]:
            self._released.pop(former, None)
            del self.slots[former]
        self._runner.write(slot, lane)
        self.slots[digest] = slot

    def _free_slot(self, used: Collection[str]) -> int | None:
        taken = set(self.slots.values())
        free = (one for one in range(1, self._runner.count + 1) if one not in taken)
        unused = (self.slots[digest] for digest in self._released if digest not in used)
        return next(free, None) or next(unused, None)

    def _no_slot(self) -> AdapterSlotsError:
        total = self._runner.count
        if self._released:
            what = "requests still use those that were unloaded; it is loaded once one of these has none"
        else:
            what = "unload one, or raise max_loras"
        return AdapterSlotsError(
            f"all {total} slots for adapters (max_loras) are taken: {what}",
            field="max_loras",
            limit=str(total),
            retry_after_seconds=1.0 if self._released else 0.0,
        )

    def release(self, digest: str) -> None:
        """Another adapter may have its slot once no request uses it."""
        if digest in self.slots:
            self._released.setdefault(digest)

    def load(self, directory: Path, seconds: float = READ_SECONDS) -> str:
        """Read, wait, write; returns the digest. Before the engine's thread runs. Raises ModelError, AdapterSlotsError or
        DeadlineError."""
        deadline = time.monotonic() + seconds
        self.begin(directory)
        while (digest := self.read_digest()) is None:
            if time.monotonic() > deadline:
                self.drop()
                raise read_too_slowly(seconds)
            time.sleep(ASK_SECONDS)
        self.write(digest)
        return digest


def read_too_slowly(seconds: float) -> DeadlineError:
    return DeadlineError(
        f"lora: its files were not read within {seconds:.0f} s", field="lora", limit=f"{seconds:.0f} s"
    )
