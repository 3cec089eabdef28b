"""Metrics and status of a decode worker, beside those of every worker (worker/metrics.py)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from prometheus_client.registry import Collector

from cluster.membership.status import WorkerStatus
from cluster.telemetry.metrics import worker as declared
from cluster.telemetry.scrape import ScrapeCollector
from decode_worker.attempts import DecodeAttempts
from kv_transfer.decode_side.receiver import HandoffReceiver
from kv_transfer.decode_side.ring import SlotState
from worker.metrics import of_queue, of_requests

# The receiver's counts → the reason why a part was dropped.
_DROPPED = {
    "stale": "stale",
    "stale_parts": "not_granted",
    "late_parts": "late",
    "part_digest": "digest",
    "part_geometry": "geometry",
    "part_failed": "failed",
}


def collectors(attempts: DecodeAttempts, receiver: HandoffReceiver) -> list[Collector]:
    return [
        declared.HANDOFF_SECONDS.show(receiver.stats.handoff_seconds),
        ScrapeCollector(
            [
                *of_queue(attempts.admission, attempts.prompt_room, attempts.ended),
                declared.RING_SLOTS_BY_STATE.read(lambda: _slots(receiver)),
                declared.RING_PARTS_WAITING.read(lambda: sum(ring.waiting for ring in receiver.rings)),
                declared.HANDOFFS_EXHAUSTED.read(lambda: bool(receiver.exhausted)),
                declared.KV_PARTS_DROPPED.read(
                    lambda: {reason: receiver.stats.counts[name] for name, reason in _DROPPED.items()}
                ),
            ]
        ),
    ]


def add_status(status: WorkerStatus, attempts: DecodeAttempts, receiver: HandoffReceiver) -> WorkerStatus:
    counts, rings = receiver.stats.counts, receiver.rings
    return replace(
        of_requests(status, attempts, attempts.admission, attempts.prompt_room, attempts.counts),
        handoffs=counts["committed"],
        handoffs_live=receiver.live,
        handoffs_aborted=counts["aborted"],
        handoffs_refused=counts["refused"],
        kv_bytes=counts["bytes"],
        parts=counts["parts"],
        digest_failures=counts["part_digest"],
        ring_slots=sum(len(ring.slots) for ring in rings),
        ring_free=sum(ring.count(SlotState.FREE) for ring in rings),
        ring_quarantined=sum(ring.count(SlotState.QUARANTINED) for ring in rings),
        transfer_rate_bytes_per_second=receiver.stats.rate_bytes_per_second,
    )


def _slots(receiver: HandoffReceiver) -> Counter[str]:
    slots = Counter({state.value: 0 for state in SlotState})
    slots.update(slot.machine.state.value for ring in receiver.rings for slot in ring.slots)
    return slots
