"""Metrics and status of a prefill worker, beside those of every worker (worker/metrics.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from prometheus_client.registry import Collector

from cluster.membership.status import WorkerStatus
from cluster.telemetry.metrics import worker as declared
from cluster.telemetry.scrape import ScrapeCollector
from kv_transfer.prefill_side.sender import HandoffSender
from prefill_worker.attempt import PrefillAttempt
from prefill_worker.prefilling import Prefilling
from worker.attempts import Attempts
from worker.metrics import of_queue, of_requests


def collectors(prefilling: Prefilling, ended: Mapping[str, float], sender: HandoffSender) -> list[Collector]:
    return [
        declared.HANDOFF_EXPOSED.show(sender.stats.exposed_seconds),
        ScrapeCollector(
            [
                *of_queue(prefilling.admission, prefilling.prompt_room, ended),
                declared.KV_SENT_BYTES.read(lambda: sender.stats.sent_bytes),
                declared.HANDOFFS_SENT.read(lambda: sender.stats.committed),
                declared.HANDOFF_LINKS.read(sender.links_by_transport),
                declared.KV_STAGING.read(lambda: sender.staging_bytes),
                declared.KV_STAGING_USED.read(lambda: sender.staging_used_bytes),
            ]
        ),
    ]


def add_status(
    status: WorkerStatus, attempts: Attempts[PrefillAttempt], prefilling: Prefilling, sender: HandoffSender
) -> WorkerStatus:
    return replace(
        of_requests(status, attempts, prefilling.admission, prefilling.prompt_room, prefilling.counts),
        handoffs=sender.stats.handoffs,
        handoffs_live=sender.live,
        handoffs_refused=sender.stats.refused,
        parts=sender.stats.parts,
        resends=sender.stats.resends,
    )
