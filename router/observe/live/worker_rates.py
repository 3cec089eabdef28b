"""Rates of workers, from the counters in their status."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from cluster.membership.types import WorkerInfo
from router.observe.live.history import RECENT_SECONDS, TICK_SECONDS, WINDOW_SECONDS


class WorkerRates(NamedTuple):
    """The hit ratio: of the last minute, or since the worker's start if there was no prompt in that time."""

    prompt_tokens_per_second: float = 0.0
    output_tokens_per_second: float = 0.0
    handoffs_per_second: float = 0.0
    prefix_hit_ratio: float | None = None


class _Counters(NamedTuple):
    at: float
    computed: float
    cached: float
    output: float
    handoffs: float


class RatesOfWorkers:
    """Keyed by worker_id@epoch: a new epoch counts from zero."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[_Counters]] = {}

    def tick(self, now: float, workers: Iterable[WorkerInfo]) -> None:
        seen: dict[str, deque[_Counters]] = {}
        length = round(RECENT_SECONDS / TICK_SECONDS) + 1
        for worker in workers:
            counters = seen[worker.name] = self._seen.get(worker.name) or deque(maxlen=length)
            one = worker.status
            read = one.prompt_tokens_computed, one.prompt_tokens_cached, one.output_tokens, one.handoffs
            counters.append(_Counters(now, *read))
        self._seen = seen

    def of(self, worker: WorkerInfo) -> WorkerRates:
        counters = self._seen.get(worker.name)
        if not counters:
            return WorkerRates()
        last, first = counters[-1], counters[0]
        then = next(one for one in counters if one.at >= last.at - WINDOW_SECONDS - TICK_SECONDS / 2)
        seconds = last.at - then.at or 1.0
        cached, computed = last.cached - first.cached, last.computed - first.computed
        if cached + computed <= 0:
            cached, computed = last.cached, last.computed
        return WorkerRates(
            (last.computed - then.computed) / seconds,
            (last.output - then.output) / seconds,
            (last.handoffs - then.handoffs) / seconds,
            cached / (cached + computed) if cached + computed > 0 else None,
        )
