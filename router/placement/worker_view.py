"""What placement works out once per version of the membership."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.membership.types import WorkerInfo
from router.placement.candidates import Candidates
from router.placement.eligibility import Eligibility
from router.placement.generations import Generations
from router.placement.types import Generation, Mode, PlacementRequest

MAX_CANDIDATES_KEPT = 8  # candidate lists, one per generation and set of excluded workers


class WorkerView:
    """Eligibility, generations, and candidate lists of one membership."""

    def __init__(self, workers: Sequence[WorkerInfo], mode: Mode):
        self.workers = workers
        self.eligibility = Eligibility(workers, mode)
        self.generations = Generations(self.eligibility.prefill, self.eligibility.decode, mode)
        self._mode = mode
        self._kept: dict[tuple[Generation | None, frozenset[str]], Candidates] = {}

    def candidates(self, request: PlacementRequest) -> Candidates:
        """Kept for the next requests: while a worker is suspect, every request excludes it."""
        wanted = request.generation, frozenset(request.excluded)
        known = self._kept.pop(wanted, None) or Candidates(*self.eligibility.candidates(request), self._mode)
        self._kept[wanted] = known  # moves it to the end: the least recently used is dropped first
        if len(self._kept) > MAX_CANDIDATES_KEPT:
            del self._kept[next(iter(self._kept))]
        return known
