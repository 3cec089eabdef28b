"""What a prefill worker shows of its queue and of the hand-offs it sends."""

from __future__ import annotations

from prometheus_client.registry import Collector

from cluster.telemetry.histogram import shown
from cluster.telemetry.scrape import ScrapeCollector, counter, gauge
from kv_transfer.prefill_side.sender import HandoffSender
from prefill_worker.role import PrefillRole
from worker import metrics


def collectors(role: PrefillRole, sender: HandoffSender) -> list[Collector]:
    return [
        shown("baton_handoff_exposed_seconds", "From prefill's end to the last part", sender.exposed_seconds),
        ScrapeCollector(
            [
                *metrics.of_queue(role.admission),
                counter("baton_attempts_ended", "Attempts by how they ended", lambda: role.ended, "outcome"),
                counter("baton_kv_sent_bytes", "KV handed over", lambda: sender.sent_bytes, "transport"),
                counter(
                    "baton_handoffs_committed", "Hand-offs taken over", lambda: sender.counts["committed"]
                ),
                gauge(
                    "baton_handoff_links", "Streams to decode workers", sender.links_by_transport, "transport"
                ),
                gauge("baton_kv_staging_bytes", "Send staging", lambda: sender.staging_bytes),
                gauge(
                    "baton_kv_staging_used_bytes", "Send staging in use", lambda: sender.staging_used_bytes
                ),
            ]
        ),
    ]
