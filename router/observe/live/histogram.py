"""Latencies in geometric buckets: small enough to share between routers, fine enough for percentiles.

    bucket i = [LOW × GROWTH^i, LOW × GROWTH^(i+1)),  50 µs … 200 s,  each 10% wide: a percentile is off by 5% at most

Counts only grow. The difference of two readings covers the time between them, the sum of all routers' counts the cluster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

LOW_SECONDS = 50e-6
GROWTH = 1.1
BUCKETS = 160
_PER_LOG = 1.0 / math.log(GROWTH)
_OFFSET = math.log(LOW_SECONDS) * _PER_LOG


class LatencyHistogram:
    def __init__(self, counts: Sequence[int] = ()):
        self.counts = list(counts) or [0] * BUCKETS

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, seconds: float) -> None:
        self.add_all((seconds,))

    def add_all(self, values: Iterable[float]) -> None:
        """Called with every token's gap: equal ones cost one logarithm together."""
        counts, log = self.counts, math.log
        for seconds, count in Counter(values).items():
            bucket = int(log(seconds) * _PER_LOG - _OFFSET) if seconds > LOW_SECONDS else 0
            counts[bucket if bucket < BUCKETS else BUCKETS - 1] += count

    def copy(self) -> LatencyHistogram:
        return LatencyHistogram(self.counts)

    def since(self, earlier: LatencyHistogram) -> LatencyHistogram:
        """The values added after `earlier`, a reading of the same histogram."""
        return LatencyHistogram(
            [max(0, now - then) for now, then in zip(self.counts, earlier.counts, strict=True)]
        )

    @staticmethod
    def total(parts: Iterable[LatencyHistogram]) -> LatencyHistogram:
        columns = zip(*(part.counts for part in parts), strict=True)
        return LatencyHistogram([sum(column) for column in columns])

    def percentile(self, share: float) -> float | None:
        """Seconds that `share` (0 … 1) of all values do not exceed; None without values."""
        rank = share * self.count
        if rank <= 0:
            return None
        below = 0
        for bucket, count in enumerate(self.counts):
            if count and below + count >= rank:
                inside = (rank - below) / count
                return float(LOW_SECONDS * GROWTH ** (bucket + inside))
            below += count
        return None

    def to_pairs(self) -> list[tuple[int, int]]:
        """(bucket, count) of the buckets that are not empty."""
        return [(bucket, count) for bucket, count in enumerate(self.counts) if count]

    @classmethod
    def from_pairs(cls, pairs: Iterable[Sequence[int]]) -> LatencyHistogram:
        """Raises ValueError or IndexError for an invalid bucket or count."""
        histogram = cls()
        for bucket, count in pairs:
            if bucket < 0 or count < 0:
                raise ValueError(f"bucket {bucket} with {count} values")
            histogram.counts[bucket] += count
        return histogram
