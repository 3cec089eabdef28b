"""Decode replicas needed for the time between tokens and for the KV blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.autoscaler.activity import OBJECTIVE_SECONDS, RATE_SECONDS, ActivityHistory, forecast
from baton.autoscaler.config import AutoscalingConfig
from baton.autoscaler.decision import WorkerSample

ITL_SHARE = 0.85  # share of the objective that is planned for: batches differ and fluctuate
FLUCTUATION = 1.0  # planned margin, in standard deviations of a Poisson number of sequences
HALF_LIFE_SECONDS = 6 * 3600.0
NEW_SHARE = 0.1  # of a new look at a batch size, in what is remembered of it
MIN_VARIETY = 0.15  # deviation of batches over their mean: with less a slope means nothing


@dataclass
class StepModel:
    """How long a decode step takes, by the sequences in it: seconds = base + each · batch, learned from workers.

    Weighted least squares over (batch, seconds of a step), older ones counting less and less.
    """

    weight: float = 0.0  # Σ w, steps
    batch: float = 0.0  # means
    seconds: float = 0.0
    spread: float = 0.0  # Σ w (batch − mean)²
    product: float = 0.0  # Σ w (batch − mean)(seconds − mean)
    seen: dict[int, float] = field(default_factory=dict)  # batch → seconds, of late
    slope: float | None = None  # seconds per sequence, from when batches last differed enough to tell

    def forget(self, seconds: float) -> None:
        """Time goes by."""
        keep = 0.5 ** (max(0.0, seconds) / HALF_LIFE_SECONDS)
        self.weight, self.spread, self.product = self.weight * keep, self.spread * keep, self.product * keep

    def add(self, batch: float, seconds: float, steps: float) -> None:
        """`steps` steps of on average `batch` sequences took `seconds` each."""
        if steps <= 0 or batch <= 0 or seconds <= 0:
            return
        self.weight += steps
        share = steps / self.weight
        from_batch, from_seconds = batch - self.batch, seconds - self.seconds
        self.batch += share * from_batch
        self.seconds += share * from_seconds
        self.spread += steps * from_batch * (batch - self.batch)
        self.product += steps * from_batch * (seconds - self.seconds)
        if self.spread > self.weight * (MIN_VARIETY * self.batch) ** 2 > 0:
            self.slope = self.product / self.spread
        size = round(batch)
        self.seen[size] = self.seen.get(size, seconds) * (1 - NEW_SHARE) + seconds * NEW_SHARE

    @property
    def known(self) -> bool:
        return self.weight > 0

    @property
    def each(self) -> float:
        """Seconds that one more sequence adds. As long as batches have not differed enough to tell: as if all of a
        step were due to its batch, which promises nothing that has not been seen."""
        if self.batch <= 0:
            return 0.0
        most = self.seconds / self.batch
        return most if self.slope is None else min(most, max(self.slope, 0.02 * most))

    @property
    def base(self) -> float:
        return max(0.0, self.seconds - self.each * self.batch)

    def batch_within(self, seconds: float) -> float:
        """The largest batch whose steps take at most `seconds`; at least 1. The line is used up to twice the
        largest batch seen, and not at all where no batch on it is small enough. A batch that was seen to fit fits."""
        if self.each <= 0:
            return 1.0
        proportional = self.batch * seconds / self.seconds
        line = (seconds - self.base) / self.each
        fits = max((size for size, took in self.seen.items() if took <= seconds), default=0)
        return max(1.0, min(max(line, proportional / 2), 2.0 * max(self.seen)), float(fits))


class DecodeDemand:
    """`arrivals` is the activity of all prefilling workers: their requests become output here a moment later."""

    def __init__(
        self,
        config: AutoscalingConfig,
        activity: ActivityHistory,
        arrivals: Sequence[ActivityHistory],
        workers: Sequence[WorkerSample],
        model: StepModel,
        delay_seconds: float,
    ):
        self.known = model.known
        self._itl_seconds = ITL_SHARE * config.itl_objective_seconds
        self.batch_limit = model.batch_within(self._itl_seconds) if self.known else 0.0
        mean = config.load_seconds
        seen = forecast(activity, lambda one: one.output_tokens, delay_seconds, mean).high
        coming = sum(
            forecast(one, lambda one: one.arrived_requests, delay_seconds, mean).high for one in arrivals
        )
        long = activity.over(RATE_SECONDS)
        requests = sum(one.over(RATE_SECONDS).arrived_requests for one in arrivals)
        self.tokens_each = long.output_tokens / requests if requests > 0 else 0.0
        self.rate = max(seen, coming * self.tokens_each)
        lately = activity.over(OBJECTIVE_SECONDS)
        self.step_seconds = lately.step_seconds / lately.steps if lately.steps > 0 else 0.0
        self._guess = model.slope is None
        statuses = [one.status for one in workers]
        self._replicas = float(len(statuses))
        # None of a worker's reports counts against the others'.
        self.sequences = float(
            sum(max(0, one.running + one.waiting + one.waiting_for_kv) for one in statuses)
        )
        used = [min(max(one.kv_usage_ratio, 0.0), 1.0) for one in statuses]
        self.kv_usage = max(used, default=0.0)
        self._kv_replicas = sum(used) / config.kv_usage_limit

    def needed_for_tokens(self, factor: float = 1.0) -> float:
        """Replicas by the arrival rate, and by the running batch in case a backlog has built up."""
        if not self.known:
            return 0.0
        # At the limit a replica produces batch_limit tokens per step of that length.
        together = max(self.rate * self._itl_seconds, self.sequences) * factor
        return (together + FLUCTUATION * math.sqrt(together)) / self.batch_limit

    def needed_for_kv(self, factor: float = 1.0) -> float:
        return self._kv_replicas * factor

    def needed(self, factor: float = 1.0) -> int:
        by_tokens = self.needed_for_tokens(factor)
        if self._guess and 0 < self.step_seconds <= self._itl_seconds:
            # Steps are short enough; how more sequences would lengthen them is not known yet.
            by_tokens = min(by_tokens, self._replicas)
        return math.ceil(max(by_tokens, self.needed_for_kv(factor)) - 1e-9)

    @property
    def terms(self) -> dict[str, float]:
        return {
            "output_tokens_per_second": self.rate,
            "sequences": self.sequences,
            "batch_limit": self.batch_limit,
            "kv_usage": self.kv_usage,
            "step_seconds": self.step_seconds,
        }
