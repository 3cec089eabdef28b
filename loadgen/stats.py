"""Distributions, said in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Summary:
    """Seconds. `count` is how many values it sums up; without any, everything is 0."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def summarise(values: Sequence[float]) -> Summary:
    if not values:
        return Summary()
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p99 = np.percentile(array, (50, 90, 99))
    return Summary(len(values), float(array.mean()), float(p50), float(p90), float(p99), float(array.max()))


def rate_over_time(events: Sequence[tuple[float, float]], bins: int) -> list[tuple[float, float]]:
    """(middle of the bin, amount a second) over the time that (time, amount) events span."""
    if not events:
        return []
    times = np.array([at for at, _ in events])
    amounts = np.array([amount for _, amount in events])
    end = max(float(times.max()), 1e-9)
    totals, edges = np.histogram(times, bins=bins, range=(0.0, end), weights=amounts)
    width = float(edges[1] - edges[0])
    return [
        (float(edge) + width / 2, float(total) / width) for edge, total in zip(edges, totals, strict=False)
    ]
