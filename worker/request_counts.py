"""Counts the requests that a worker prefills, for its status."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from itertools import accumulate

from cluster.membership.status import BOUNDS_SECONDS, WorkerStatus


class RequestCounts:
    """Counts the requests that this worker prefills: prompt tokens, times to first token."""

    def __init__(self) -> None:
        self._requests = 0
        self._tokens = 0
        self._counts = [0] * (len(BOUNDS_SECONDS) + 1)

    def arrived(self, prompt_tokens: int) -> None:
        self._requests += 1
        self._tokens += prompt_tokens

    def first_token(self, seconds: float) -> None:
        """Count a first token, `seconds` after its request arrived at this worker."""
        self._counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1

    def onto(self, status: WorkerStatus) -> WorkerStatus:
        """The status with these counters. Bounds are cumulative."""
        within = tuple(accumulate(self._counts))
        return replace(
            status,
            arrived_requests=self._requests,
            arrived_prompt_tokens=self._tokens,
            first_tokens=within[-1],
            first_tokens_within=within[:-1],
        )
