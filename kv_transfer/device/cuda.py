"""Parts on a CUDA device: copied and summed on a stream of their own, beside the engine's.

    engine's stream   … layer 7 │ layer 8 │ layer 9 …
                                └─ mark ──┐
    this stream                          wait, gather, sum, (copy to the host) ── event, polled by the host

The engine's stream never waits for this one, and the host waits for neither.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_transfer.device import sum64
from kv_transfer.device.base import Done, Mark, Pending, ReadPart
from kv_transfer.device.torch_cuda import Cuda, Event, TorchCuda
from kv_transfer.layout.block_rows import CacheRows
from kv_transfer.layout.conversion import Conversion
from kv_transfer.layout.digest import NONE, SUM64
from kv_transfer.layout.geometry import pairs
from kv_transfer.layout.rows import CacheRegion

log = logging.getLogger(__name__)
T = TypeVar("T")
B = TypeVar("B")

WORKS = 8  # in progress at a time; each has buffers of its own
HOST_PARTS = 2  # parts on their way through main memory, for transports that read nothing else
MIN_ROW_BYTES = 256  # `device_bytes` counts the row numbers of a cache whose rows are at least as long
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class EventMark:
    event: Event

    def result(self) -> bool | None:
        return True if self.event.query() else None


class BufferPool(Generic[B]):
    """A fixed number of buffers."""

    def __init__(self, buffers: list[B]):
        self._free = deque(buffers)
        self._released: list[tuple[Event, B]] = []  # in use until the event

    def acquire(self) -> B | None:
        """None if all are in use."""
        for one in [one for one in self._released if one[0].query()]:
            self._released.remove(one)
            self._free.append(one[1])
        return self._free.popleft() if self._free else None

    def release(self, buffer: B, after: Event | None = None) -> None:
        """`after`: the last event that uses the buffer; None: it is not in use any more."""
        if after is None:
            self._free.append(buffer)
        else:
            self._released.append((after, buffer))


@dataclass(eq=False)
class Buffers:
    """Buffers of one copy beside its part; int64, the host's pinned."""

    rows: Tensor  # [most rows of a part]: row numbers in the cache
    host_rows: Tensor
    sums: Tensor  # [SUMS]: partial sums of the digest
    host_sums: Tensor


class IndexedRows(NamedTuple):
    """A part's whole blocks as rows: `part[i]` belongs to `cache[numbers[i]]`. Both consist of the widest integers that
    divide a row, and what comes before the first one in the part (of a cut block)."""

    cache: Tensor  # [all rows, columns]
    numbers: Tensor  # int64 [rows]
    part: Tensor  # [rows, columns]


class EnqueuedWork(Generic[T]):
    """Work that has ended at an event. `finish` makes its result, and is called once."""

    def __init__(self, event: Event, finish: Callable[[], T]):
        self._event = event
        self._finish = finish
        self._result: T | None = None

    def result(self) -> T | None:
        if self._result is None and self._event.query():
            self._result = self._finish()
        return self._result


class CudaCopier:
    digest_kinds = (SUM64,)

    def __init__(
        self,
        kv_cache: Tensor,
        part_bytes: int,
        cuda: Cuda | None = None,
        conversion: Conversion | None = None,
    ):
        """`part_bytes`: of the largest part; `conversion`: of parts that are scattered. Make it on the thread that loads
        the model: a decode worker's engine computes in the stream that is current here."""
        self._cache = kv_cache
        self._conversion = conversion
        self._cuda: Cuda = cuda or TorchCuda(kv_cache.device)
        self._rows = CacheRows.of(kv_cache)
        self._engine_stream = self._cuda.current_stream()
        self._stream = self._cuda.new_stream()
        # With a conversion they are the numbers of blocks, and two blocks may be cut.
        rows = max(2, part_bytes // (self._rows.least_elements * kv_cache.element_size()))
        with self._cuda.on(self._stream):
            self._buffers = BufferPool([self._make_buffers(rows) for _ in range(WORKS)])
            self._host_parts = BufferPool([self._cuda.pinned(part_bytes) for _ in range(HOST_PARTS)])
        self._sum = self._choose_sum()

    def _make_buffers(self, rows: int) -> Buffers:
        def two(count: int) -> tuple[Tensor, Tensor]:
            return tuple(make(8 * count).view(torch.int64) for make in (self._cuda.empty, self._cuda.pinned))  # type: ignore[return-value]

        return Buffers(*two(rows), *two(sum64.SUMS))

    def _choose_sum(self) -> sum64.Sum:
        """Compile the kernel and run it once, so that the first part does not wait for that."""
        chosen = sum64.kernel()
        if chosen is None:
            return sum64.torch_sums
        with self._cuda.on(self._stream):
            try:
                words = self._cuda.empty(1024).view(torch.int32).fill_(1)
                sums = self._cuda.empty(8 * sum64.SUMS).view(torch.int64)
                chosen(words, sums)
                self._cuda.synchronize(self._stream)
            except Exception:  # no C compiler, a driver that is too old
                log.exception("digests are summed by torch, which takes more memory: the kernel does not run")
                return sum64.torch_sums
        return chosen

    @property
    def device(self) -> torch.device:
        return self._cache.device

    def allocate(self, size: int) -> Tensor:
        return self._cuda.empty(size)

    def use_thread(self) -> None:
        self._cuda.use_thread(self._stream)

    def mark(self) -> Mark:
        current = self._cuda.current_stream()
        return EventMark(self._cuda.record(self._engine_stream if current == self._stream else current))

    def enqueued(self) -> Mark:
        return EventMark(self._cuda.record(self._stream))

    def pieces(self, region: CacheRegion, least_bytes: int) -> None:
        """None: parts are gathered. It was measured on no card yet whether reading the cache's many pieces is faster."""

    def read(
        self, region: CacheRegion, into: Tensor, kind: str, after: Mark, *, to_host: bool
    ) -> Pending[ReadPart] | None:
        self._rows.check(region)
        buffers = self._buffers.acquire()
        host = self._host_parts.acquire() if to_host and buffers is not None else None
        if buffers is None or (to_host and host is None):
            if buffers is not None:
                self._buffers.release(buffers)
            return None
        pieces = [into if host is None else host[: into.numel()]]

        def enqueue() -> None:
            self._wait(after)
            self._gather(region, into, buffers)
            self._add_up(into, kind, buffers)
            if host is not None:
                pieces[0].copy_(into, non_blocking=True)

        def release() -> None:
            if host is not None:
                self._host_parts.release(host)

        def finish() -> ReadPart:
            return ReadPart(pieces, self._digest_in(buffers, kind), release)

        return self._run(enqueue, finish, buffers, host)

    def fill(self, slot: Tensor, payload: bytes) -> bool:
        host = self._host_parts.acquire()
        if host is None:
            return False
        size = len(payload)
        host.numpy()[:size] = np.frombuffer(payload, dtype=np.uint8)
        try:
            slot[:size].copy_(host[:size], non_blocking=True)
        finally:
            self._host_parts.release(host, after=self._cuda.record(self._stream))
        return True

    def digest(self, data: Tensor, kind: str) -> Pending[bytes] | None:
        if kind == NONE:
            return Done(b"")
        buffers = self._buffers.acquire()
        if buffers is None:
            return None
        return self._run(
            lambda: self._add_up(data, kind, buffers), lambda: self._digest_in(buffers, kind), buffers
        )

    def scatter(self, data: Tensor, region: CacheRegion, after: Mark) -> Pending[bool] | None:
        self._rows.check(region)
        buffers = self._buffers.acquire()
        if buffers is None:
            return None

        def enqueue() -> None:
            self._wait(after)
            self._scatter(data, region, buffers)

        return self._run(enqueue, lambda: True, buffers)

    # --- on the copier's stream --------------------------------------------------------------------------

    def _run(
        self,
        enqueue: Callable[[], None],
        finish: Callable[[], T],
        buffers: Buffers,
        host: Tensor | None = None,
    ) -> Pending[T]:
        """Enqueue work. Where that raises, the buffers stay in use until what was enqueued has ended."""
        try:
            enqueue()
        except BaseException:
            event = self._cuda.record(self._stream)
            self._buffers.release(buffers, after=event)
            if host is not None:
                self._host_parts.release(host, after=event)
            raise

        def end() -> T:
            result = finish()
            self._buffers.release(buffers)
            return result

        return EnqueuedWork(self._cuda.record(self._stream), end)

    def _wait(self, after: Mark) -> None:
        if isinstance(after, EventMark):
            self._cuda.wait(self._stream, after.event)

    def _gather(self, region: CacheRegion, part: Tensor, buffers: Buffers) -> None:
        """One launch for all whole blocks."""
        if (rows := self._indexed(region, part, buffers)) is not None:
            torch.index_select(rows.cache, 0, rows.numbers, out=rows.part)
        for inside_cache, inside_part in self._cut(region, part):
            inside_part.copy_(inside_cache, non_blocking=True)

    def _scatter(self, part: Tensor, region: CacheRegion, buffers: Buffers) -> None:
        if self._conversion is not None:
            ids = self._to_device(np.asarray(region.block_ids, dtype=np.int64), buffers)
            self._conversion.scatter(self._cache, part, region, ids)
            return
        if (rows := self._indexed(region, part, buffers)) is not None:
            rows.cache.index_copy_(0, rows.numbers, rows.part)
        for inside_cache, inside_part in self._cut(region, part):
            inside_cache.copy_(inside_part, non_blocking=True)

    def _indexed(self, region: CacheRegion, part: Tensor, buffers: Buffers) -> IndexedRows | None:
        """None for a part without a whole block."""
        whole = self._rows.whole(region)
        if whole is None:
            return None
        width = self._cache.element_size()
        row_bytes, first = whole.row_elements * width, whole.begin * width
        word = _WORDS[next(size for size in _WORDS if row_bytes % size == first % size == 0)]
        columns = row_bytes // word.itemsize
        count = len(whole.index)
        return IndexedRows(
            self._cache.view(-1).view(word).view(-1, columns),
            self._to_device(whole.index, buffers),
            part[first : first + count * row_bytes].view(word).view(count, columns),
        )

    @staticmethod
    def _to_device(numbers: NDArray[np.int64], buffers: Buffers) -> Tensor:
        count = len(numbers)
        buffers.host_rows.numpy()[:count] = numbers
        return buffers.rows[:count].copy_(buffers.host_rows[:count], non_blocking=True)

    def _cut(self, region: CacheRegion, part: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views of the cut blocks: (in the cache, in the part)."""
        flat = part.view(self._cache.dtype)
        return [
            pair for cut, begin in self._rows.cut(region) for pair in pairs(self._cache, flat[begin:], cut)
        ]

    def _add_up(self, data: Tensor, kind: str, buffers: Buffers) -> None:
        if kind == NONE:
            return
        self._sum(data.view(torch.int32), buffers.sums)
        buffers.host_sums.copy_(buffers.sums, non_blocking=True)

    def _digest_in(self, buffers: Buffers, kind: str) -> bytes:
        return b"" if kind == NONE else sum64.sum64(buffers.host_sums)


def host_bytes(part_bytes: int) -> int:
    """Upper bound of the bytes of main memory that a copier pins. torch's allocator takes powers of two."""
    rows = 8 * (part_bytes // MIN_ROW_BYTES)
    sizes = [*(rows, 8 * sum64.SUMS) * WORKS, *(part_bytes,) * HOST_PARTS]
    return sum(1 << (max(1, size) - 1).bit_length() for size in sizes)


def device_bytes(part_bytes: int) -> int:
    """Upper bound of the bytes of device memory that a copier allocates, for parts of at most `part_bytes`."""
    buffers = WORKS * 8 * (part_bytes // MIN_ROW_BYTES + sum64.SUMS)
    return buffers + (0 if sum64.kernel() else 3 * part_bytes)
