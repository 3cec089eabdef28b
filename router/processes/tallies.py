"""Tallies over all processes of a router: limits hold for all of them together.

A process adds to its own slot before it reads the others'. Of two that reach for the last place at once, at least one sees
the other, so a limit is never exceeded; both may see each other and both be refused.
"""

from __future__ import annotations

import hashlib

from cluster.errors import OverloadedError
from router.admission.tally import Tallies
from router.processes.memory import Fence, Figure, SharedMemory, Slot, others


class SharedTotal:
    """The sum over all holders of one figure of each slot."""

    def __init__(self, memory: SharedMemory, index: int, figure: Figure, fence: Fence):
        self._own = memory.slot(index)
        self._others = list(others(memory, index))
        self._figure = figure
        self._fence = fence

    def add(self, holder: str, count: int) -> int:
        here = self._own.add(self._figure, count)
        if count < 0:
            return here  # what a release leaves is not compared with a limit
        self._fence.pass_()
        return self.total(holder)

    def total(self, holder: str) -> int:
        return self.here(holder) + sum(slot.get(self._figure) for slot in self._others)

    def here(self, holder: str) -> int:
        return self._own.get(self._figure)

    def __len__(self) -> int:
        return int(self.here("") != 0)


class TenantCells:
    """The cells of a process's own slot, by tenant. A cell is free again once both its counts are 0."""

    def __init__(self, slot: Slot):
        self.slot = slot
        self.by_tenant: dict[str, int] = {}
        self._columns = slot.column(0), slot.column(1)
        self._free = list(range(slot.tenants - 1, -1, -1))

    def of(self, tenant: str) -> int:
        """Raises OverloadedError."""
        cell = self.by_tenant.get(tenant)
        if cell is None:
            if not self._free:
                limit = self.slot.tenants
                text = f"this router has requests of {limit} tenants in flight"
                raise OverloadedError(text, limit=str(limit), retry_after_seconds=1.0)
            cell = self.by_tenant[tenant] = self._free.pop()
            self.slot.set_key(cell, key_of(tenant))
        return cell

    def free_if_empty(self, tenant: str, words: memoryview[int]) -> None:
        cell = self.by_tenant[tenant]
        if not any(words[column + cell] for column in self._columns):
            self.slot.set_key(cell, 0)
            del self.by_tenant[tenant]
            self._free.append(cell)


class SharedByTenant:
    """One column of every slot: 0 = requests, 1 = bytes."""

    def __init__(self, memory: SharedMemory, index: int, column: int, cells: TenantCells, fence: Fence):
        self._words = memory.words
        self._column = cells.slot.column(column)
        self._cells = cells
        self._others = [(slot, slot.column(column)) for slot in others(memory, index)]
        self._fence = fence

    def add(self, holder: str, count: int) -> int:
        word = self._column + self._cells.of(holder)
        self._words[word] += count
        here = self._words[word]
        if count < 0:
            if not here:
                self._cells.free_if_empty(holder, self._words)
            return here
        self._fence.pass_()
        return self.total(holder)

    def total(self, holder: str) -> int:
        key = key_of(holder)
        return self.here(holder) + sum(self._in(slot, column, key) for slot, column in self._others)

    def _in(self, slot: Slot, column: int, key: int) -> int:
        if not slot.get(Figure.IN_FLIGHT):  # a request counts there before it counts for its tenant
            return 0
        cell = slot.find(key)
        return 0 if cell is None else self._words[column + cell]

    def here(self, holder: str) -> int:
        cell = self._cells.by_tenant.get(holder)
        return 0 if cell is None else self._words[self._column + cell]

    def __len__(self) -> int:
        return sum(self._words[self._column + cell] != 0 for cell in self._cells.by_tenant.values())


def shared_tallies(memory: SharedMemory, index: int) -> Tallies:
    """The tallies for the process of this index."""
    fence, cells = Fence(), TenantCells(memory.slot(index))
    return Tallies(
        SharedTotal(memory, index, Figure.IN_FLIGHT, fence),
        SharedByTenant(memory, index, 0, cells, fence),
        SharedTotal(memory, index, Figure.BODY_BYTES, fence),
        SharedByTenant(memory, index, 1, cells, fence),
    )


def key_of(tenant: str) -> int:
    """A key of 64 bits. Not 0, which marks a free cell."""
    digest = hashlib.blake2b(tenant.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1
