"""What a worker of either role shows beside its status: the engine's steps, its place in the cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from cluster.telemetry.histogram import STAGE_SECONDS, HistogramFamily, shown
from cluster.telemetry.scrape import ScrapeCollector, ScrapedMetric, counter, gauge

if TYPE_CHECKING:
    from cluster.membership.registration import Registration
    from worker.admission import Admission
    from worker.core import WorkerCore


def collectors(core: WorkerCore) -> list[Collector]:
    engine = core.engine
    steps = HistogramFamily(
        "baton_engine_step_seconds",
        "Steps of the engine, by whether a prompt was in them",
        STAGE_SECONDS,
        ["kind"],
    )
    for kind, histogram in engine.step_times.seconds.items():
        steps.adopt(histogram, kind)
    return [
        steps,
        shown("baton_engine_step_tokens", "Tokens computed in a step", engine.step_times.tokens),
        shown("baton_engine_step_requests", "Sequences in a step", engine.step_times.requests),
        shown(
            "baton_event_loop_lag_seconds", "How late the event loop runs its timers", core.loop_lag.seconds
        ),
        ScrapeCollector(_readings(core)),
    ]


def _readings(core: WorkerCore) -> list[ScrapedMetric]:
    return [
        gauge("baton_worker_ready", "1 while new work is taken", lambda: _ready(core)),
        gauge("baton_worker_draining", "1 while it only finishes what it has", lambda: core.health.draining),
        gauge("baton_engine_healthy", "0 once the engine has failed or stands still", core.host.healthy),
        gauge("baton_engine_busy_seconds", "How long the step in progress has run", core.host.busy_seconds),
        counter(
            "baton_worker_fenced", "Lives ended because others had gone on without it", lambda: core.fenced
        ),
        gauge("baton_redis_up", "1 while this worker reaches Redis", _of(core, lambda r: not r.unreachable)),
        counter("baton_redis_errors", "Calls that Redis did not answer", _of(core, lambda r: r.errors)),
        gauge(
            "baton_worker_registered", "1 while Redis has given it a slot", _of(core, lambda r: r.slot != 0)
        ),
        gauge("baton_index_reports_waiting", "Prefix chains not yet reported", lambda: core.reports_waiting),
    ]


def of_queue(queue: Admission) -> list[ScrapedMetric]:
    """Of the prompts that wait for their turn: all of them at a prefill worker, local ones at a decode worker."""
    return [
        gauge("baton_prefill_queue_requests", "Requests queued here", queue.waiting_by_class, "class"),
        gauge("baton_prefill_queue_oldest_seconds", "How long the first has queued", queue.oldest_seconds),
        gauge("baton_prefill_admitted_tokens", "Prompt tokens past the queue", lambda: queue.inside_tokens),
    ]


def _ready(core: WorkerCore) -> bool:
    return not core.health.why_not_ready()


def _of(core: WorkerCore, read: Callable[[Registration], float]) -> Callable[[], float]:
    """Of its registration; 0 where it runs without Redis."""
    return lambda: read(core.registration) if core.registration is not None else 0.0
