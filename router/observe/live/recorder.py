"""The counts of one router, which only grow. `token` is called for every token: keep it short."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from router.observe.live.histogram import LatencyHistogram
from router.placement.types import Placed
from wire import common_pb2

MAX_PAIRS = 4096  # of workers; further ones are not counted


class PairTraffic(NamedTuple):
    """KV sent from one prefill worker to one decode worker."""

    bytes: int = 0
    handoffs: int = 0

    def plus(self, size: int, handoffs: int) -> PairTraffic:
        return PairTraffic(self.bytes + size, self.handoffs + handoffs)


NO_TRAFFIC = PairTraffic()


@dataclass
class Recorder:
    ttft: LatencyHistogram = field(default_factory=LatencyHistogram)
    itl: LatencyHistogram = field(default_factory=LatencyHistogram)
    output_tokens: int = 0
    flows: dict[tuple[str, str], PairTraffic] = field(default_factory=dict)

    def token(self, first_seconds: float | None, gap_seconds: float | None) -> None:
        """`first_seconds`: from the request's arrival to its first token. `gap_seconds`: since the choice's token before.
        Neither: the first token of a further choice."""
        self.output_tokens += 1
        if first_seconds is not None:
            self.ttft.add(first_seconds)
        if gap_seconds is not None:
            self.itl.add(gap_seconds)

    def handed_over(self, placed: Placed, report: common_pb2.WorkReport) -> None:
        """A worker's report of an attempt; only prefill workers report shipped bytes."""
        if not report.kv_bytes_shipped or placed.prefill is None:
            return
        pair = (placed.prefill.worker_id, placed.decode.worker_id)
        if pair in self.flows or len(self.flows) < MAX_PAIRS:
            self.flows[pair] = self.flows.get(pair, NO_TRAFFIC).plus(report.kv_bytes_shipped, 1)

    def keep_only(self, workers: set[str]) -> None:
        """Delete pairs whose workers are both gone."""
        for pair in [pair for pair in self.flows if workers.isdisjoint(pair)]:
            del self.flows[pair]
