"""Facts about decode workers that a prefill worker keeps after their streams have closed, for the most recent 1,024."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

# As many as the idle connections that a NIXL agent keeps: other workers have no connection
MAX_WORKERS = 1024


@dataclass
class Known:
    epoch: int = 0  # the last one received; 0 = none
    reached: bool = False  # by a probe


class KnownWorkers:
    def __init__(self, max_workers: int = MAX_WORKERS):
        self._max_workers = max_workers
        self._workers: OrderedDict[str, Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def epoch(self, worker_id: str) -> int:
        return self._workers.get(worker_id, Known()).epoch

    def was_reached(self, worker_id: str) -> bool:
        return self._workers.get(worker_id, Known()).reached

    def has_epoch(self, worker_id: str, epoch: int) -> None:
        self._met(worker_id).epoch = epoch

    def is_reached(self, worker_id: str) -> None:
        self._met(worker_id).reached = True

    def _met(self, worker_id: str) -> Known:
        known = self._workers.setdefault(worker_id, Known())
        self._workers.move_to_end(worker_id)
        while len(self._workers) > self._max_workers:
            self._workers.popitem(last=False)
        return known
