"""Counters of a prefill worker's hand-offs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cluster.telemetry.histogram import Histogram
from cluster.telemetry.metrics import worker as metrics
from kv_transfer.transports.registry import TRANSPORTS


def by_transport() -> Counter[str]:
    """A zero for every transport, so that its series exists."""
    return Counter(dict.fromkeys(TRANSPORTS, 0))


@dataclass
class SenderStats:
    handoffs: int = 0  # begun
    refused: int = 0
    committed: int = 0
    parts: int = 0  # verified
    resends: int = 0
    sent_bytes: Counter[str] = field(default_factory=by_transport)
    exposed_seconds: Histogram = field(default_factory=metrics.HANDOFF_EXPOSED.create)

    def part_answered(self, verified: bool) -> None:
        if verified:
            self.parts += 1
        else:
            self.resends += 1

    def handed_over(self, transport: str, shipped_bytes: int, exposed_seconds: float) -> None:
        self.committed += 1
        self.sent_bytes[transport] += shipped_bytes
        self.exposed_seconds.observe(exposed_seconds)
