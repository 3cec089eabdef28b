"""Placement while Redis does not answer: by the load last read from it, this router's own charges and memory of prefixes,
and the power of two choices."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence

from cluster.membership.types import WorkerInfo
from cluster.protocol.block_hash import INDEX_KEY_BYTES
from router.placement.calibration import Calibrations
from router.placement.candidates import Candidates
from router.placement.charges import Charges
from router.placement.last_loads import LastLoads
from router.placement.place_script import too_late
from router.placement.types import Placed, PlacementRequest

MAX_REMEMBERED = 50_000


class StandalonePlacement:
    """Needs no other process."""

    def __init__(self, calibrations: Calibrations, charges: Charges, last: LastLoads, rng: random.Random):
        self._calibrations = calibrations
        self._charges = charges
        self._last = last
        self._rng = rng
        self._seen: OrderedDict[bytes, str] = OrderedDict()  # block key → the last worker that had it
        self._noted: deque[tuple[bytes, str]] = deque()
        self._noted_bytes = 0

    def remember(self, chain: bytes, worker_id: str) -> None:
        """Note the placement. Its blocks are indexed only when Redis is gone, and most notes are dropped before that."""
        if not chain:
            return
        self._noted.append((chain, worker_id))
        self._noted_bytes += len(chain)
        while self._noted_bytes > MAX_REMEMBERED * INDEX_KEY_BYTES:
            self._noted_bytes -= len(self._noted.popleft()[0])

    def place(self, request: PlacementRequest, candidates: Candidates) -> Placed:
        """Raises OverloadedError."""
        chain, prefill = request.chain, None
        at_prefill = b"" if request.whole_prompt else chain
        hands_over = candidates.prefill and not request.ends_at_prefill
        decode = self._pick(candidates.decode, candidates.decode_by_id, chain if hands_over else at_prefill)
        if candidates.prefill:
            prefill = self._pick(candidates.prefill, candidates.prefill_by_id, at_prefill)
            self._refuse_late(request, self._charges.by_worker.get(prefill.name, 0))
        return Placed(prefill, decode, 0, 0, False, uncached_tokens=request.token_count)

    def _refuse_late(self, request: PlacementRequest, ahead_tokens: int) -> None:
        """By this router's own requests alone, which are fewer than all: better than no limit. Those of others are as old
        as the outage, and an old queue must refuse nothing."""
        calibration = self._calibrations.of(request.model)
        ahead_seconds, compute = ahead_tokens / calibration.rate, calibration.a * request.token_count
        target = request.target_seconds
        if calibration.known and 0 < target < ahead_seconds + compute and ahead_seconds > compute:
            raise too_late(request, ahead_seconds + compute)

    def _pick(
        self,
        workers: Sequence[WorkerInfo],
        by_id: Mapping[str, WorkerInfo],
        chain: bytes,
    ) -> WorkerInfo:
        """The holder of the longest remembered prefix, unless the better of two random workers is much freer."""
        among = self._least_loaded(workers)
        light = min((self._rng.choice(among), self._rng.choice(among)), key=self._load)
        holder = self._holder(by_id, chain)
        # 8 bytes of the chain stand for a block: with blocks of 16 tokens they are half of the prompt's tokens.
        if holder is None or self._load(holder) > 2 * self._load(light) + len(chain):
            return light
        return holder

    def _least_loaded(self, workers: Sequence[WorkerInfo]) -> Sequence[WorkerInfo]:
        """The workers of a large fleet that had the least load when Redis last answered."""
        if not self._last.valid:
            return workers
        return [worker for worker in workers if self._last.of(worker.name) is not None] or workers

    def _load(self, worker: WorkerInfo) -> int:
        """The worker's load in tokens."""
        if self._last.valid:
            return self._last.at_least(worker.name)
        return self._charges.by_worker.get(worker.name, 0)

    def _holder(self, by_id: Mapping[str, WorkerInfo], chain: bytes) -> WorkerInfo | None:
        self._index_noted()
        for begin in range(len(chain) - INDEX_KEY_BYTES, -1, -INDEX_KEY_BYTES):
            worker_id = self._seen.get(chain[begin : begin + INDEX_KEY_BYTES])
            if worker_id is not None and worker_id in by_id:
                return by_id[worker_id]
        return None

    def _index_noted(self) -> None:
        while self._noted:
            chain, worker_id = self._noted.popleft()
            for begin in range(0, len(chain), INDEX_KEY_BYTES):
                key = chain[begin : begin + INDEX_KEY_BYTES]
                self._seen[key] = worker_id
                self._seen.move_to_end(key)
            while len(self._seen) > MAX_REMEMBERED:
                self._seen.popitem(last=False)
        self._noted_bytes = 0
