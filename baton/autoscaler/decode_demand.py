"""Decode replicas needed for the time between tokens and for the KV blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.autoscaler.config import AutoscalingConfig
from baton.autoscaler.flows import Flows
from baton.autoscaler.forecast import forecast
from baton.autoscaler.observation import WorkerSample
from baton.autoscaler.step_model import StepModel

ITL_SHARE = 0.85  # share of the objective that is planned for: batches differ and fluctuate
RATE_SECONDS = 1800.0
OBJECTIVE_SECONDS = 120.0
FLUCTUATION = 1.0  # planned margin, in standard deviations of a Poisson number of sequences


class DecodeDemand:
    """`arrivals` are the flows of all prefilling workers: their requests become output here a moment later."""

    def __init__(
        self,
        config: AutoscalingConfig,
        flows: Flows,
        arrivals: Sequence[Flows],
        workers: Sequence[WorkerSample],
        model: StepModel,
        delay_seconds: float,
    ):
        self.known = model.known
        self._itl_seconds = ITL_SHARE * config.itl_objective_seconds
        self.batch_limit = model.batch_within(self._itl_seconds) if self.known else 0.0
        mean = config.load_seconds
        seen = forecast(flows, lambda flow: flow.output_tokens, delay_seconds, mean).high
        coming = sum(
            forecast(one, lambda flow: flow.arrived_requests, delay_seconds, mean).high for one in arrivals
        )
        long = flows.over(RATE_SECONDS)
        requests = sum(one.over(RATE_SECONDS).arrived_requests for one in arrivals)
        self.tokens_each = long.output_tokens / requests if requests > 0 else 0.0
        self.rate = max(seen, coming * self.tokens_each)
        lately = flows.over(OBJECTIVE_SECONDS)
        self.step_seconds = lately.step_seconds / lately.steps if lately.steps > 0 else 0.0
        self._guess = model.slope is None
        told = [one.status for one in workers]
        self._replicas = float(len(told))
        self.sequences = float(sum(one.running + one.waiting + one.waiting_for_kv for one in told))
        used = [one.kv_usage_ratio for one in told]
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
