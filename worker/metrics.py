"""Metrics and status of a worker of either role: its engine, its attempts, its registration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.membership.status import WorkerStatus
from cluster.security.expiry import seconds_left
from cluster.security.identity import Identity as TlsIdentity
from cluster.telemetry.loop_lag import LoopLag
from cluster.telemetry.metrics import process
from cluster.telemetry.metrics import worker as declared
from cluster.telemetry.scrape import ScrapeCollector, ScrapedMetric
from worker.admission import Admissions
from worker.attempts import Attempts
from worker.health import Health
from worker.identity import WorkerIdentity
from worker.loaded_engine import LoadedEngine
from worker.membership import Membership
from worker.prompt_scores_room import PromptScoresRoom
from worker.request_counts import RequestCounts


def of_worker(
    engine: LoadedEngine,
    health: Health,
    identity: WorkerIdentity,
    membership: Membership,
    loop_lag: LoopLag,
    status: Callable[[], WorkerStatus],
    tls: TlsIdentity | None,
) -> list[Collector]:
    times = engine.engine.step_times
    steps = declared.ENGINE_STEP_SECONDS.create_family()
    for kind, histogram in times.seconds.items():
        steps.adopt(histogram, kind)
    return [
        _Published(status, identity.role),
        steps,
        declared.ENGINE_STEP_TOKENS.show(times.tokens),
        declared.ENGINE_STEP_REQUESTS.show(times.requests),
        process.EVENT_LOOP_LAG.show(loop_lag.seconds),
        ScrapeCollector(
            [
                process.CERTIFICATE_EXPIRES.read(lambda: seconds_left((tls, "tls_cert", "tls_ca"))),
                declared.READY.read(lambda: not health.why_not_ready()),
                declared.DRAINING.read(lambda: health.draining),
                declared.ENGINE_HEALTHY.read(engine.host.healthy),
                declared.ENGINE_BUSY.read(engine.host.busy_seconds),
                declared.FENCED.read(lambda: identity.fenced),
                declared.REDIS_UP.read(lambda: membership.redis_up),
                declared.REDIS_ERRORS.read(lambda: membership.redis_errors),
                declared.REGISTERED.read(lambda: membership.has_slot),
                declared.INDEX_UP.read(lambda: membership.index_up),
                declared.INDEX_REPORTS_WAITING.read(lambda: membership.reports_waiting),
            ]
        ),
    ]


class _Published(Collector):
    """The worker's status."""

    def __init__(self, status: Callable[[], WorkerStatus], role: str):
        self._status = status
        self._role = role

    def collect(self) -> Iterator[Metric]:
        for metric, value in self._status().metrics(self._role):
            family = metric.empty()
            family.add_metric((), value)
            yield family


def of_requests(
    status: WorkerStatus,
    attempts: Attempts[Any],
    queue: Admissions,
    room: PromptScoresRoom,
    counts: RequestCounts,
) -> WorkerStatus:
    """The status with the requests of a worker of either role."""
    counted = replace(
        status,
        attempts=len(attempts),
        queued=queue.waiting + room.waiting,
        queued_prefill_tokens=queue.tokens,
    )
    return counts.onto(counted)


def of_queue(queue: Admissions, room: PromptScoresRoom, ended: Mapping[str, float]) -> list[ScrapedMetric]:
    """Prompts that wait for their turn, or before it for room: all of them at a prefill worker, local prefills at a decode
    worker."""

    def by_class() -> dict[str, int]:
        of_room = room.waiting_by_class()
        return {name: count + of_room[name] for name, count in queue.waiting_by_class().items()}

    return [
        declared.QUEUE_REQUESTS.read(by_class),
        declared.QUEUE_OLDEST.read(lambda: max(queue.oldest_seconds(), room.oldest_seconds())),
        declared.ADMITTED_TOKENS.read(lambda: queue.inside_tokens),
        declared.ATTEMPTS_ENDED.read(lambda: ended),
    ]
