"""The cost model's constants, learned from workers' reports: prefill seconds = a·u + b·u·(L − u/2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from wire import common_pb2

_WEIGHT = 0.1
_START_BANDWIDTH = 1e9
_GUESS = (1.0, 1.0, 0.5, 0.5, 0.5)  # bandwidth by level, relative to the nearest, until one is measured
_START_A = 1e-3
_SURPRISE = 4.0  # at most so many times the expected time counts: a worker that was stopped is no example
_KNOWN = 48  # prefills; a worker's first ones take longer than all later ones


@dataclass
class Calibration:
    a: float = _START_A  # seconds per token
    b: float = 0.0  # seconds per pair of tokens
    # Measured bytes per second, by level (topology.LEVELS)
    bandwidths: dict[int, float] = field(default_factory=dict)
    token_bytes: float = 1.0
    decode_token_seconds: float = 2e-8  # that a resident token adds to a step
    observed: int = 0  # prefills learned from
    _mean_tokens: float = 0.0

    @property
    def known(self) -> bool:
        """Enough prefills were observed to refuse requests by it."""
        return self.observed >= _KNOWN

    @property
    def rate(self) -> float:
        """Prefill tokens per second."""
        return 1.0 / self.a

    def learn(
        self, report: common_pb2.WorkReport, prompt_tokens: int, level: int | None, *, scored: bool = False
    ) -> None:
        """Learn from a worker's report of one request. `level`: of the pair of its hand-off; None without one. `scored`:
        its steps made logits of each position, which takes longer than other prompts do."""
        total = report.computed_prompt_tokens + report.cached_tokens
        if not scored:
            self.observe_prefill(report.computed_prompt_tokens, total, report.prompt_compute_seconds)
        if report.kv_bytes_shipped and level is not None:
            shipped = prompt_tokens - report.not_shipped_tokens
            self.observe_transfer(level, report.kv_bytes_shipped, shipped, report.handoff_exposed_seconds)

    def observe_prefill(self, computed_tokens: int, total_tokens: int, seconds: float) -> None:
        """Least-mean-squares on the two terms; both stay positive, the first samples weigh more.

        `seconds`: of the prompt, without the time it waited for others in the same batch, as queues shorten by that.
        """
        if computed_tokens < 16 or seconds <= 0:
            return
        self.observed += 1
        weight = max(_WEIGHT, 1 / self.observed)
        self._mean_tokens += weight * (computed_tokens - self._mean_tokens)
        # By their tokens: short prompts, whose steps cost more per token, tell little about the length of a queue.
        weight = min(1.0, weight * computed_tokens / self._mean_tokens)
        pairs = computed_tokens * (total_tokens - computed_tokens / 2)
        expected = self.a * computed_tokens + self.b * pairs
        error = (min(seconds, _SURPRISE * expected) if self.known else seconds) - expected
        scale = computed_tokens**2 + (1e-3 * pairs) ** 2
        self.a = max(1e-8, self.a + weight * error * computed_tokens / scale)
        self.b = max(0.0, self.b + weight * error * 1e-6 * pairs / scale)

    def rates(self) -> list[float]:
        """Bytes per second for each level; without a measurement, from the nearest level that has one."""
        if not self.bandwidths:
            return [_START_BANDWIDTH * share for share in _GUESS]
        nearest = [min(self.bandwidths, key=lambda known: abs(known - level)) for level in range(len(_GUESS))]
        return [self.bandwidths[known] * _GUESS[level] / _GUESS[known] for level, known in enumerate(nearest)]

    def observe_transfer(self, level: int, shipped_bytes: int, shipped_tokens: int, seconds: float) -> None:
        if shipped_tokens > 0:
            self.token_bytes = shipped_bytes / shipped_tokens
        if shipped_bytes >= 1 << 20 and seconds > 1e-4:
            measured = shipped_bytes / seconds
            known = self.bandwidths.setdefault(level, measured)
            self.bandwidths[level] = known + _WEIGHT * (measured - known)


class Calibrations:
    """One for each model of a router, by its name: what one model takes for a token says nothing about another."""

    def __init__(self, models: Sequence[str] = ()):
        """`models`: the first of them has the requests that name none."""
        self.first = Calibration()
        self._further = {name: Calibration() for name in models[1:]}

    def of(self, model: str) -> Calibration:
        return self._further.get(model, self.first)
