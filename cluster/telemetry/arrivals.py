"""What has been asked of a worker, and how late its first tokens came: counters that a worker publishes with its status,
and that whoever reads them twice can turn into rates."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

# An objective that is one of these is judged exactly; one between two of them, by a straight line.
BOUNDS_SECONDS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0)


class Arrivals:
    """Requests that this worker prefills."""

    def __init__(self) -> None:
        self._requests = 0
        self._tokens = 0
        self._counts = [0] * (len(BOUNDS_SECONDS) + 1)

    def came(self, prompt_tokens: int) -> None:
        self._requests += 1
        self._tokens += prompt_tokens

    def first_token(self, seconds: float) -> None:
        """Seconds since the request came to this worker."""
        self._counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1

    def status(self) -> dict[str, int]:
        """Bounds are cumulative."""
        within = list(accumulate(self._counts))
        return {
            "arrived_requests": self._requests,
            "arrived_prompt_tokens": self._tokens,
            **{f"first_tokens_within_{b:g}s": n for b, n in zip(BOUNDS_SECONDS, within, strict=False)},
            "first_tokens": within[-1],
        }
