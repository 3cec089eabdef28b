"""Memory that the processes of a router share: counts of what each of them holds, and its readiness.

    slot 0 │ slot 1 │ …          slot = figures │ status │ keys of tenants │ their requests │ their bytes

A slot has one writer: the process whose index it is; once that has ended, the parent, which empties it. All processes read
all slots, and a sum is read over them. So there is no lock, and none that a killed process could keep.

All words have 8 bytes and are aligned: the processor writes each at once.
"""

from __future__ import annotations

import enum
import mmap
import os
import threading
import time
from collections.abc import Iterator

WORD = 8
STATUS_BYTES = 1024
# Tenants, and pairs of tenant and model, with requests in flight in one process; more are refused
MAX_TENANTS = 1 << 17
READ_TRIES = 3


class Figure(enum.IntEnum):
    """Words at the beginning of a slot."""

    BEAT = 0  # nanoseconds of the machine's monotonic clock; 0: no process has served here yet
    IN_FLIGHT = 1
    HTTP_CONNECTIONS = 2
    BODY_BYTES = 3
    REQUESTS = 4  # since the router started, of all processes that had the slot
    STATUS_VERSION = 5  # odd while the status is written
    STATUS_LENGTH = 6
    DRAINING = 7
    OPENING = 8  # HTTP connections whose client has sent nothing yet, or whose handshake has not ended


_FIGURES = len(Figure)
_STATUS = _FIGURES * WORD
_KEYS = _STATUS + STATUS_BYTES


class SharedMemory:
    """`create` in the parent, `attach` in its processes, which inherit `fd`."""

    def __init__(self, fd: int, processes: int, tenants: int):
        self.fd = fd
        self.processes = processes
        self.tenants = tenants
        self._map = mmap.mmap(fd, _size(processes, tenants))
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("q")
        self._slot_bytes = _slot_size(tenants)

    @classmethod
    def create(cls, processes: int, holders: int) -> SharedMemory:
        """`holders`: that can have requests in flight at once."""
        tenants = min(holders, MAX_TENANTS)
        fd = os.memfd_create("baton-router")
        os.ftruncate(fd, _size(processes, tenants))
        return cls(fd, processes, tenants)

    def slot(self, index: int) -> Slot:
        return Slot(self, index * self._slot_bytes)

    def slots(self) -> list[Slot]:
        return [self.slot(index) for index in range(self.processes)]

    def reclaim(self, index: int) -> None:
        """Return what the process held. For the parent, after the process has ended: nothing else writes there then."""
        self.slot(index).clear()

    def close(self) -> None:
        """Slots that are still referenced keep the memory."""
        os.close(self.fd)


class Slot:
    def __init__(self, memory: SharedMemory, offset: int):
        self._words = memory.words
        self._bytes = memory.bytes
        self._first = offset // WORD
        self._offset = offset
        self._end = offset + _slot_size(memory.tenants)
        self.tenants = memory.tenants

    # --- figures -------------------------------------------------------------------------------------------------

    def get(self, figure: Figure) -> int:
        return self._words[self._first + figure]

    def set(self, figure: Figure, value: int) -> None:
        self._words[self._first + figure] = value

    def add(self, figure: Figure, count: int) -> int:
        word = self._first + figure
        self._words[word] += count
        return self._words[word]

    def beat(self) -> None:
        self.set(Figure.BEAT, time.monotonic_ns())

    def silent_seconds(self) -> float | None:
        """Since the last beat; None: no process has served here since the slot was emptied."""
        beat = self.get(Figure.BEAT)
        return (time.monotonic_ns() - beat) / 1e9 if beat else None

    # --- status --------------------------------------------------------------------------------------------------

    def write_status(self, reasons: list[str]) -> None:
        """Why the process is not ready; empty: it is."""
        raw = "\n".join(reasons).encode()[:STATUS_BYTES]
        self.add(Figure.STATUS_VERSION, 1)
        begin = self._offset + _STATUS
        self._bytes[begin : begin + len(raw)] = raw
        self.set(Figure.STATUS_LENGTH, len(raw))
        self.add(Figure.STATUS_VERSION, 1)

    def read_status(self) -> list[str]:
        """The last status, whole; a process that was killed while it wrote one is about to change."""
        for _ in range(READ_TRIES):
            version = self.get(Figure.STATUS_VERSION)
            begin = self._offset + _STATUS
            raw = bytes(self._bytes[begin : begin + self.get(Figure.STATUS_LENGTH)])
            if version % 2 == 0 and version == self.get(Figure.STATUS_VERSION):
                return raw.decode(errors="replace").split("\n") if raw else []
        return ["its status changes"]

    # --- tenants -------------------------------------------------------------------------------------------------

    def key(self, cell: int) -> int:
        return self._words[self._first + _KEYS // WORD + cell]

    def set_key(self, cell: int, key: int) -> None:
        self._words[self._first + _KEYS // WORD + cell] = key

    def find(self, key: int) -> int | None:
        """The cell of a tenant; None: it has nothing here."""
        begin = self._offset + _KEYS
        keys = bytes(self._bytes[begin : begin + WORD * self.tenants])
        wanted = key.to_bytes(WORD, "little", signed=True)
        at = keys.find(wanted)
        while at >= 0 and at % WORD:  # the end of one key and the beginning of the next
            at = keys.find(wanted, at + 1)
        return None if at < 0 else at // WORD

    def column(self, number: int) -> int:
        """The first word of a column: 0 = requests, 1 = bytes of each tenant."""
        return self._first + _KEYS // WORD + (1 + number) * self.tenants

    def clear(self) -> None:
        """All but REQUESTS, which never falls. The counts before the keys: no reader finds a tenant with another one's."""
        counts = self.column(0) * WORD
        self._bytes[counts : self._end] = bytes(self._end - counts)
        for figure in Figure:
            if figure != Figure.REQUESTS:
                self.set(figure, 0)
        status = self._offset + _STATUS
        self._bytes[status:counts] = bytes(counts - status)


class Fence:
    """A memory barrier: writes before `pass_` are visible to other processes before anything is read after it.

    A processor may read ahead of its own writes. Taking a free lock needs an atomic instruction, which waits for them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def pass_(self) -> None:
        with self._lock:
            pass


def others(memory: SharedMemory, index: int) -> Iterator[Slot]:
    return (slot for number, slot in enumerate(memory.slots()) if number != index)


def _slot_size(tenants: int) -> int:
    return _KEYS + 3 * WORD * tenants


def _size(processes: int, tenants: int) -> int:
    return processes * _slot_size(tenants)
