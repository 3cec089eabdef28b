"""Activity of a pool over the last minutes, from the counters of workers that start and stop."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from baton.autoscaler.decision import WorkerSample
from cluster.membership.status import BOUNDS_SECONDS, WorkerStatus

KEEP_SECONDS = 3600.0
RATE_SECONDS = 1800.0  # window of a replica's speed and the length of prompts, which change slowly
OBJECTIVE_SECONDS = 120.0  # window over which an objective is judged
Vector = NDArray[np.float64]


class _Counter:
    """A counter at an index of the values; `read` takes it from a worker's status."""

    def __init__(self, index: int, read: Callable[[WorkerStatus], float]):
        self._index = index
        self.read = read

    def __get__(self, activity: Activity, owner: type[Activity]) -> float:
        return float(activity.values[self._index])


@dataclass(frozen=True)
class Activity:
    """Differences of counters over `seconds`, of a worker or a pool."""

    values: Vector

    seconds = _Counter(0, lambda one: 0.0)
    arrived_requests = _Counter(1, lambda one: one.arrived_requests)
    arrived_tokens = _Counter(2, lambda one: one.arrived_prompt_tokens)
    computed_tokens = _Counter(3, lambda one: one.prompt_tokens_computed)
    prefill_seconds = _Counter(4, lambda one: one.prefill_seconds)
    output_tokens = _Counter(5, lambda one: one.output_tokens)
    steps = _Counter(6, lambda one: one.steps)
    step_seconds = _Counter(7, lambda one: one.prefill_seconds + one.decode_seconds)
    first_tokens = _Counter(8, lambda one: one.first_tokens)

    def per_second(self, value: float) -> float:
        return value / self.seconds if self.seconds > 0 else 0.0

    def first_tokens_within(self, seconds: float) -> float:
        """Share of first tokens within `seconds`; 1 if there were none."""
        if self.first_tokens <= 0:
            return 1.0
        within = self.values[len(_COUNTERS) :]
        return float(np.interp(seconds, (0.0, *BOUNDS_SECONDS), (0.0, *within))) / self.first_tokens


_COUNTERS = [one for one in vars(Activity).values() if isinstance(one, _Counter)]
_SIZE = len(_COUNTERS) + len(BOUNDS_SECONDS)


# Less than a real counter grows by, and more than one reaches: ratios and squares of what is between them are finite
# numbers, whatever a worker reports.
LEAST_COUNT, MOST_COUNT = 1e-6, 2.0**53


def _vector(one: WorkerStatus) -> Vector:
    counts = np.array((*(counter.read(one) for counter in _COUNTERS), *one.first_tokens_within), np.float64)
    return np.where(counts < LEAST_COUNT, 0.0, np.minimum(counts, MOST_COUNT))


@dataclass
class ActivityHistory:
    """History of one pool. The first sample of a worker is the baseline for its later ones."""

    _last: dict[str, Vector] = field(default_factory=dict)
    _times: list[float] = field(default_factory=list)
    _sums: list[Vector] = field(default_factory=list)  # cumulative, at each of _times

    def update(self, now: float, workers: Sequence[WorkerSample]) -> dict[str, Activity]:
        """Add samples taken at `now` (monotonic seconds). Returns the activity of each known worker."""
        seconds = now - self._times[-1] if self._times else 0.0
        vectors = {one.name: _vector(one.status) for one in workers}
        shares = {}
        for name, vector in vectors.items():
            if name in self._last:
                # A counter that decreased belongs to a new process, whose baseline this sample is.
                grown = vector - self._last[name]
                shares[name] = np.where(grown < LEAST_COUNT, 0.0, grown)
                shares[name][0] = seconds
        total = sum(shares.values(), np.zeros(_SIZE))
        total[0] = seconds
        self._last = vectors
        self._sums.append(self._sums[-1] + total if self._sums else np.zeros(_SIZE))
        self._times.append(now)
        while self._times[0] < now - KEEP_SECONDS:
            del self._times[0], self._sums[0]
        return {name: Activity(share) for name, share in shares.items()}

    def over(self, seconds: float, skip: float = 0.0) -> Activity:
        """Sum over `seconds` that end `skip` seconds ago, as far as known."""
        if not self._times:
            return Activity(np.zeros(_SIZE))
        return Activity(self._up_to(self._times[-1] - skip) - self._up_to(self._times[-1] - skip - seconds))

    def _up_to(self, time: float) -> Vector:
        return self._sums[max(0, bisect_right(self._times, time) - 1)]


SHORT_SHARE = 0.2  # share of the usual window: one minute of five
MAX_GROWTH = 0.5  # largest share that a trend may add


@dataclass(frozen=True)
class Forecast:
    now: float  # per second, over the last minutes
    high: float  # per second: the highest of now, the last minute, and the extrapolated trend


def forecast(
    activity: ActivityHistory,
    quantity: Callable[[Activity], float],
    ahead_seconds: float,
    mean_seconds: float,
) -> Forecast:
    """Extrapolate the change between two means over `mean_seconds` by `ahead_seconds` plus half of `mean_seconds`, the age
    of a mean. A falling trend is not extrapolated: growing late costs more than shrinking late."""
    recent, before = activity.over(mean_seconds), activity.over(mean_seconds, skip=mean_seconds)
    minute = activity.over(SHORT_SHARE * mean_seconds)
    now = recent.per_second(quantity(recent))
    high = max(now, minute.per_second(quantity(minute)))
    if before.seconds >= mean_seconds * 0.9:
        slope = (now - before.per_second(quantity(before))) / mean_seconds
        grown = now + slope * (ahead_seconds + mean_seconds / 2)
        high = max(high, min(grown, now * (1 + MAX_GROWTH)))
    return Forecast(now, high)
