"""Counters of a decode worker's hand-offs, and the rate at which parts arrive."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from cluster.telemetry.histogram import Histogram
from cluster.telemetry.metrics import worker as metrics
from kv_transfer.decode_side.incoming import IncomingHandoff
from kv_transfer.messages import PartLanded

ASSUMED_RATE = 500e6  # bytes per second, before the first part was measured


@dataclass
class ReceiverStats:
    counts: Counter[str] = field(default_factory=Counter)
    handoff_seconds: Histogram = field(default_factory=metrics.HANDOFF_SECONDS.create)
    rate_bytes_per_second: float = ASSUMED_RATE

    def part_verified(self, part: PartLanded) -> None:
        self.counts["parts"] += 1
        self.counts["bytes"] += part.bytes

    def committed(self, handoff: IncomingHandoff) -> None:
        self.counts["committed"] += 1
        measured = handoff.rate_bytes_per_second or self.rate_bytes_per_second
        self.rate_bytes_per_second += 0.2 * (measured - self.rate_bytes_per_second)
        self.handoff_seconds.observe(time.monotonic() - handoff.times.reserved)
