"""What a worker of either role publishes and shows of its engine, its attempts and its place in the cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.membership.registration import Registration
from cluster.membership.status import WorkerStatus
from cluster.telemetry.metrics import process
from cluster.telemetry.metrics import worker as declared
from cluster.telemetry.scrape import ScrapeCollector, ScrapedMetric
from worker.admission import Admission
from worker.arrivals import Arrivals
from worker.attempts import Attempts
from worker.core import WorkerCore


def of_worker(core: WorkerCore) -> list[Collector]:
    times = core.engine.step_times
    steps = declared.ENGINE_STEP_SECONDS.create_family()
    for kind, histogram in times.seconds.items():
        steps.adopt(histogram, kind)
    return [
        _Published(core),
        steps,
        declared.ENGINE_STEP_TOKENS.show(times.tokens),
        declared.ENGINE_STEP_REQUESTS.show(times.requests),
        process.EVENT_LOOP_LAG.show(core.loop_lag.seconds),
        ScrapeCollector(
            [
                declared.READY.read(lambda: not core.health.why_not_ready()),
                declared.DRAINING.read(lambda: core.health.draining),
                declared.ENGINE_HEALTHY.read(core.host.healthy),
                declared.ENGINE_BUSY.read(core.host.busy_seconds),
                declared.FENCED.read(lambda: core.fenced),
                declared.REDIS_UP.read(_of(core, lambda r: not r.unreachable)),
                declared.REDIS_ERRORS.read(_of(core, lambda r: r.errors)),
                declared.REGISTERED.read(_of(core, lambda r: r.slot != 0)),
                declared.INDEX_REPORTS_WAITING.read(lambda: core.reports_waiting),
            ]
        ),
    ]


class _Published(Collector):
    """The worker's status."""

    def __init__(self, core: WorkerCore):
        self._core = core

    def collect(self) -> Iterator[Metric]:
        for metric, value in self._core.published_status().metrics(self._core.config.role):
            family = metric.empty()
            family.add_metric((), value)
            yield family


def of_requests(
    status: WorkerStatus, attempts: Attempts[Any], queue: Admission, arrivals: Arrivals
) -> WorkerStatus:
    """The status, with what either role publishes of its requests."""
    told = replace(status, attempts=len(attempts), queued=queue.waiting, queued_prefill_tokens=queue.tokens)
    return arrivals.onto(told)


def of_queue(queue: Admission, ended: Mapping[str, float]) -> list[ScrapedMetric]:
    """Of the prompts that wait for their turn: all of them at a prefill worker, local ones at a decode worker."""
    return [
        declared.QUEUE_REQUESTS.read(queue.waiting_by_class),
        declared.QUEUE_OLDEST.read(queue.oldest_seconds),
        declared.ADMITTED_TOKENS.read(lambda: queue.inside_tokens),
        declared.ATTEMPTS_ENDED.read(lambda: ended),
    ]


def _of(core: WorkerCore, read: Callable[[Registration], float]) -> Callable[[], float]:
    """Of its registration; 0 where it runs without Redis."""
    return lambda: read(core.registration) if core.registration is not None else 0.0
