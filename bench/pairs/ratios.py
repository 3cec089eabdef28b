"""Ratios of pairs and their confidence intervals."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 10_000
LEVEL = 0.95
SEED = 1
Sample = dict[str, float]  # seconds by figure


@dataclass(frozen=True)
class Ratio:
    """The ratio of one figure over all pairs; `low` and `high` bound the median ratio with 95 % confidence."""

    name: str
    pairs: int
    base: float  # median seconds
    new: float
    median: float
    low: float
    high: float


def ratios(pairs: Sequence[tuple[Sample, Sample]]) -> list[Ratio]:
    """A ratio for every figure that both trees of every pair have."""
    if not pairs:
        return []
    names = [name for name in pairs[0][0] if all(name in base and name in new for base, new in pairs)]
    return [_ratio(name, [(base[name], new[name]) for base, new in pairs]) for name in names]


def _ratio(name: str, values: Sequence[tuple[float, float]]) -> Ratio:
    each = [new / base for base, new in values]
    low, high = interval(each)
    return Ratio(
        name,
        len(each),
        statistics.median(base for base, _ in values),
        statistics.median(new for _, new in values),
        statistics.median(each),
        low,
        high,
    )


def interval(values: Sequence[float], resamples: int = RESAMPLES) -> tuple[float, float]:
    """Percentile bootstrap of the median (Efron and Tibshirani, 1993, chapter 13)."""
    source = random.Random(SEED)
    medians = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(resamples))
    outside = round(resamples * (1 - LEVEL) / 2)
    return medians[outside], medians[-1 - outside]
