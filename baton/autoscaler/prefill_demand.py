"""Prefill replicas needed for timely first tokens: an M/G/n queue with measured rates."""

from __future__ import annotations

import math

from baton.autoscaler.activity import RATE_SECONDS, ActivityHistory, forecast
from baton.autoscaler.config import AutoscalingConfig

QUEUE_SHARE = 0.5  # share of the objective for waiting; the rest is for the prompt itself
VARIABILITY = 1.0  # (deviation / mean)² of prompts' times: about 1 in public traces
MAX_REPLICAS = 4096


def wait_beyond(replicas: int, offered: float, service_seconds: float, seconds: float) -> float:
    """Probability that a request waits longer than `seconds`, with `offered` replicas' worth of work arriving.

    Erlang's C for the probability of waiting at all; the tail falls exponentially, slower by the mean of the
    variabilities of arrivals (1: Poisson) and of service (the two-moment approximation of Allen and Cunneen).
    """
    if offered >= replicas:
        return 1.0
    if offered <= 0:
        return 0.0
    blocked = 1.0  # Erlang B, by recursion
    for n in range(1, replicas + 1):
        blocked = offered * blocked / (n + offered * blocked)
    waits = blocked / (1 - offered / replicas * (1 - blocked))
    decay = 2.0 * (replicas - offered) / ((1.0 + VARIABILITY) * service_seconds)
    return waits * math.exp(-decay * seconds)


def replicas_for(offered: float, service_seconds: float, seconds: float, late_share: float) -> int:
    """The fewest replicas with which at most `late_share` of requests wait longer than `seconds`."""
    n = max(1, math.ceil(offered)) if offered > 0 else 0
    while n < MAX_REPLICAS and wait_beyond(n, offered, service_seconds, seconds) > late_share:
        n += 1
    return n


def too_many_late(requests: float, within: float, attainment: float) -> bool:
    """Whether more are late than the objective allows, by more than three standard deviations."""
    allowed = (1.0 - attainment) * requests
    return (1.0 - within) * requests > allowed + 3 * math.sqrt(allowed) + 1


class PrefillDemand:
    """Demand from one pool's activity and queue. `offered`: work in fully busy replicas."""

    def __init__(
        self,
        config: AutoscalingConfig,
        activity: ActivityHistory,
        queued_tokens: float,
        delay_seconds: float,
    ):
        long = activity.over(RATE_SECONDS)
        self._config = config
        self.known = long.computed_tokens > 0 and long.prefill_seconds > 0 and long.arrived_requests > 0
        self.queued_tokens = queued_tokens
        # Tokens per busy second
        self.speed = long.computed_tokens / long.prefill_seconds if self.known else 0.0
        # Cached tokens cost nothing: only tokens that must be computed are offered work.
        share = min(1.0, long.computed_tokens / long.arrived_tokens) if long.arrived_tokens > 0 else 1.0
        coming = forecast(activity, lambda one: one.arrived_tokens, delay_seconds, config.load_seconds)
        self.rate = coming.high * share
        self.offered = self.rate / self.speed if self.known else 0.0
        requests = long.arrived_requests
        self.prompt_tokens = long.arrived_tokens / requests if self.known else 0.0
        self.service_seconds = long.prefill_seconds / requests if self.known else 0.0
        # The backlog beyond what is allowed must clear within the start-up time of a new replica.
        allowed = QUEUE_SHARE * config.ttft_objective_seconds * self.rate
        excess = max(0.0, queued_tokens - allowed)
        self.backlog = excess / (self.speed * max(delay_seconds, 1.0)) if self.known else 0.0

    def needed(self, factor: float = 1.0) -> int:
        """Return the replicas needed for `factor` times the load."""
        if not self.known:
            return 0
        late = 1.0 - self._config.attainment
        wait = QUEUE_SHARE * self._config.ttft_objective_seconds
        return replicas_for((self.offered + self.backlog) * factor, self.service_seconds, wait, late)

    def waits(self, ready: int) -> bool:
        """Whether requests wait besides those being computed; a long prompt without a queue is not helped by replicas."""
        return self.known and self.queued_tokens > 2 * self.prompt_tokens * max(1, ready)

    @property
    def terms(self) -> dict[str, float]:
        return {
            "tokens_per_second": self.rate,
            "replica_tokens_per_second": self.speed,
            "queued_tokens": self.queued_tokens,
            "offered": self.offered,
            "backlog": self.backlog,
        }
