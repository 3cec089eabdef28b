"""Activity of a pool over the last minutes, from the counters of workers that start and stop."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from baton.autoscaler.observation import WorkerSample
from cluster.membership.status import BOUNDS_SECONDS, WorkerStatus

KEEP_SECONDS = 3600.0
_COUNTERS: dict[str, Callable[[WorkerStatus], float]] = {
    "arrived_requests": lambda one: one.arrived_requests,
    "arrived_tokens": lambda one: one.arrived_prompt_tokens,
    "computed_tokens": lambda one: one.prompt_tokens_computed,
    "prefill_seconds": lambda one: one.prefill_seconds,
    "output_tokens": lambda one: one.output_tokens,
    "steps": lambda one: one.steps,
    "step_seconds": lambda one: one.prefill_seconds + one.decode_seconds,
    "first_tokens": lambda one: one.first_tokens,
}
_PLACES = {name: place for place, name in enumerate(_COUNTERS, start=1)}
_SIZE = 1 + len(_COUNTERS) + len(BOUNDS_SECONDS)
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Flow:
    """Differences of counters over `seconds`, of a worker or a pool."""

    values: Vector

    def _value(self, name: str) -> float:
        return float(self.values[_PLACES[name]])

    @property
    def seconds(self) -> float:
        return float(self.values[0])

    @property
    def arrived_requests(self) -> float:
        return self._value("arrived_requests")

    @property
    def arrived_tokens(self) -> float:
        return self._value("arrived_tokens")

    @property
    def computed_tokens(self) -> float:
        return self._value("computed_tokens")

    @property
    def prefill_seconds(self) -> float:
        return self._value("prefill_seconds")

    @property
    def output_tokens(self) -> float:
        return self._value("output_tokens")

    @property
    def steps(self) -> float:
        return self._value("steps")

    @property
    def step_seconds(self) -> float:
        return self._value("step_seconds")

    @property
    def first_tokens(self) -> float:
        return self._value("first_tokens")

    def per_second(self, value: float) -> float:
        return value / self.seconds if self.seconds > 0 else 0.0

    def first_tokens_within(self, seconds: float) -> float:
        """Share of first tokens within `seconds`; 1 if there were none."""
        if self.first_tokens <= 0:
            return 1.0
        within = self.values[1 + len(_COUNTERS) :]
        return float(np.interp(seconds, (0.0, *BOUNDS_SECONDS), (0.0, *within))) / self.first_tokens


def _vector(one: WorkerStatus) -> Vector:
    return np.array((0.0, *(read(one) for read in _COUNTERS.values()), *one.first_tokens_within))


@dataclass
class Flows:
    """History of one pool. The first sample of a worker is the baseline for its later ones."""

    _last: dict[str, Vector] = field(default_factory=dict)
    _times: list[float] = field(default_factory=list)
    _sums: list[Vector] = field(default_factory=list)  # cumulative, at each of _times

    @property
    def known_seconds(self) -> float:
        return self._times[-1] - self._times[0] if self._times else 0.0

    def update(self, now: float, workers: Sequence[WorkerSample]) -> dict[str, Flow]:
        """Add samples taken at `now` (monotonic seconds). Returns the activity of each known worker."""
        seconds = now - self._times[-1] if self._times else 0.0
        vectors = {one.name: _vector(one.status) for one in workers}
        shares = {}
        for name, vector in vectors.items():
            if name in self._last:
                # A counter that decreased belongs to a new process, whose baseline this sample is.
                shares[name] = np.maximum(vector - self._last[name], 0.0)
                shares[name][0] = seconds
        total = sum(shares.values(), np.zeros(_SIZE))
        total[0] = seconds
        self._last = vectors
        self._sums.append(self._sums[-1] + total if self._sums else np.zeros(_SIZE))
        self._times.append(now)
        while self._times[0] < now - KEEP_SECONDS:
            del self._times[0], self._sums[0]
        return {name: Flow(share) for name, share in shares.items()}

    def over(self, seconds: float, skip: float = 0.0) -> Flow:
        """Sum over `seconds` that end `skip` seconds ago, as far as known."""
        if not self._times:
            return Flow(np.zeros(_SIZE))
        return Flow(self._up_to(self._times[-1] - skip) - self._up_to(self._times[-1] - skip - seconds))

    def _up_to(self, time: float) -> Vector:
        return self._sums[max(0, bisect_right(self._times, time) - 1)]
