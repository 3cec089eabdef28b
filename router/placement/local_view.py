"""Placement while Redis is gone: our own charges and our own memory of prefixes, power of two choices."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence

from cluster.membership.types import WorkerInfo
from cluster.protocol.block_hash import INDEX_KEY_BYTES

MAX_REMEMBERED = 50_000


class LocalView:
    """Never fails a request for want of Redis; knows only what this router did."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._seen: OrderedDict[bytes, str] = OrderedDict()  # block key → worker that had it last
        self._noted: deque[tuple[bytes, str]] = deque()
        self._noted_bytes = 0

    def remember(self, chain: bytes, worker_id: str) -> None:
        """Only notes it: block by block it is taken in when Redis is gone, which most of it never sees."""
        if not chain:
            return
        self._noted.append((chain, worker_id))
        self._noted_bytes += len(chain)
        while self._noted_bytes > MAX_REMEMBERED * INDEX_KEY_BYTES:
            self._noted_bytes -= len(self._noted.popleft()[0])

    def _take_in(self) -> None:
        while self._noted:
            self._index(*self._noted.popleft())
        self._noted_bytes = 0

    def _index(self, chain: bytes, worker_id: str) -> None:
        for begin in range(0, len(chain), INDEX_KEY_BYTES):
            key = chain[begin : begin + INDEX_KEY_BYTES]
            self._seen[key] = worker_id
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)

    def pick(self, workers: Sequence[WorkerInfo], load: Mapping[str, int], chain: bytes) -> WorkerInfo:
        """The holder of the longest prefix we remember, unless the better of two random ones is much freer."""
        first, second = self._rng.choice(workers), self._rng.choice(workers)
        light = min((first, second), key=lambda worker: load.get(worker.name, 0))
        holder = self._holder(workers, chain)
        if holder is None or load.get(holder.name, 0) > 2 * load.get(light.name, 0) + len(chain):
            return light
        return holder

    def _holder(self, workers: Sequence[WorkerInfo], chain: bytes) -> WorkerInfo | None:
        self._take_in()
        by_id = {worker.worker_id: worker for worker in workers}
        for begin in range(len(chain) - INDEX_KEY_BYTES, -1, -INDEX_KEY_BYTES):
            worker_id = self._seen.get(chain[begin : begin + INDEX_KEY_BYTES])
            if worker_id in by_id:
                return by_id[worker_id]
        return None
