"""What a decode worker shows of the hand-offs it takes."""

from __future__ import annotations

from collections import Counter

from prometheus_client.registry import Collector

from cluster.telemetry.histogram import shown
from cluster.telemetry.scrape import ScrapeCollector, counter, gauge
from decode_worker.role import DecodeRole
from kv_transfer.decode_side.receiver import HandoffReceiver
from kv_transfer.decode_side.ring import SlotState
from worker import metrics

# The receiver's counts → the reason why a part was not taken.
_DROPPED = {
    "stale": "stale",
    "late_parts": "late",
    "part_digest": "digest",
    "part_geometry": "geometry",
    "part_failed": "failed",
}


def collectors(role: DecodeRole, receiver: HandoffReceiver) -> list[Collector]:
    return [
        shown("baton_handoff_seconds", "From Reserve to the commit", receiver.handoff_seconds),
        ScrapeCollector(
            [
                *metrics.of_queue(role.admission),
                gauge("baton_ring_slots_by_state", "Landing slots", lambda: _slots(receiver), "state"),
                gauge("baton_ring_claims_waiting", "Parts that want a slot", lambda: _waiting(receiver)),
                gauge(
                    "baton_handoffs_exhausted",
                    "1 once too much of the ring is in doubt",
                    lambda: bool(receiver.exhausted),
                ),
                counter("baton_kv_parts_dropped", "Parts not taken", lambda: _dropped(receiver), "reason"),
                counter("baton_attempts_ended", "Attempts by how they ended", lambda: role.ended, "outcome"),
            ]
        ),
    ]


def _slots(receiver: HandoffReceiver) -> Counter[str]:
    slots = Counter({state.value: 0 for state in SlotState})
    slots.update(slot.machine.state.value for ring in receiver.rings for slot in ring.slots)
    return slots


def _waiting(receiver: HandoffReceiver) -> int:
    return sum(ring.waiting for ring in receiver.rings)


def _dropped(receiver: HandoffReceiver) -> dict[str, float]:
    return {reason: receiver.counts[name] for name, reason in _DROPPED.items()}
