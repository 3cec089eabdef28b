"""What a prefill worker shows."""

from __future__ import annotations

from prometheus_client.registry import Collector

from cluster.telemetry.metrics import worker as declared
from cluster.telemetry.scrape import ScrapeCollector
from kv_transfer.prefill_side.sender import HandoffSender
from prefill_worker.role import PrefillRole
from worker import metrics
from worker.core import WorkerCore


def collectors(core: WorkerCore, role: PrefillRole, sender: HandoffSender) -> list[Collector]:
    return [
        *metrics.of_worker(core),
        declared.HANDOFF_EXPOSED.show(sender.stats.exposed_seconds),
        ScrapeCollector(
            [
                *metrics.of_queue(role.admission, role.ended),
                declared.KV_SENT_BYTES.read(lambda: sender.stats.sent_bytes),
                declared.HANDOFFS_SENT.read(lambda: sender.stats.committed),
                declared.HANDOFF_LINKS.read(sender.links.by_transport),
                declared.KV_STAGING.read(lambda: sender.staging_bytes),
                declared.KV_STAGING_USED.read(lambda: sender.staging_used_bytes),
            ]
        ),
    ]
