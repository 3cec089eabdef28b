"""What a decode worker shows."""

from __future__ import annotations

from collections import Counter

from prometheus_client.registry import Collector

from cluster.telemetry.metrics import worker as declared
from cluster.telemetry.scrape import ScrapeCollector
from decode_worker.role import DecodeRole
from kv_transfer.decode_side.receiver import HandoffReceiver
from kv_transfer.decode_side.ring import SlotState
from worker import metrics
from worker.core import WorkerCore

# The receiver's counts → the reason why a part was not taken.
_DROPPED = {
    "stale": "stale",
    "late_parts": "late",
    "part_digest": "digest",
    "part_geometry": "geometry",
    "part_failed": "failed",
}


def collectors(core: WorkerCore, role: DecodeRole, receiver: HandoffReceiver) -> list[Collector]:
    return [
        *metrics.of_worker(core),
        declared.HANDOFF_SECONDS.show(receiver.stats.handoff_seconds),
        ScrapeCollector(
            [
                *metrics.of_queue(role.admission, role.ended),
                declared.RING_SLOTS_BY_STATE.read(lambda: _slots(receiver)),
                declared.RING_CLAIMS_WAITING.read(lambda: sum(ring.waiting for ring in receiver.rings)),
                declared.HANDOFFS_EXHAUSTED.read(lambda: bool(receiver.exhausted)),
                declared.KV_PARTS_DROPPED.read(
                    lambda: {reason: receiver.stats.counts[name] for name, reason in _DROPPED.items()}
                ),
            ]
        ),
    ]


def _slots(receiver: HandoffReceiver) -> Counter[str]:
    slots = Counter({state.value: 0 for state in SlotState})
    slots.update(slot.machine.state.value for ring in receiver.rings for slot in ring.slots)
    return slots
