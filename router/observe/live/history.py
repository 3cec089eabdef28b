"""The last minutes of the whole cluster, in slots of two seconds.

tick   tick   tick   tick        every router's counts are read at each tick;
 │ slot │ slot │ slot │          a slot holds the counts of all of them between two ticks
 └──── WINDOW (10 s) ─┘          a point of the charts: rates and percentiles over the last slots
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from router.observe.live.report import Counts, Pair, PairTraffic, RouterReport, flows_together

TICK_SECONDS = 2.0
WINDOW_SECONDS = 10.0  # of a point, and of every rate
RECENT_SECONDS = 60.0  # of the percentiles shown as figures
POINTS = 150  # five minutes
_SHARES = (0.5, 0.9, 0.99)


class Percentiles(NamedTuple):
    """Seconds; None without values."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class ChartPoint(NamedTuple):
    ttft: Percentiles = Percentiles()
    itl: Percentiles = Percentiles()
    requests_per_second: float = 0.0
    refused_per_second: float = 0.0
    failed_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    output_tokens_per_second: float = 0.0
    kv_bytes_per_second: float = 0.0
    cached_ratio: float | None = None


class RouterRates(NamedTuple):
    requests_per_second: float = 0.0
    output_tokens_per_second: float = 0.0


class FlowRates(NamedTuple):
    bytes_per_second: float
    handoffs_per_second: float


@dataclass(frozen=True)
class _Slot:
    seconds: float
    total: Counts
    flows: dict[Pair, PairTraffic]
    kv_bytes: int
    by_router: dict[str, Counts]

    @classmethod
    def of(cls, seconds: float, by_router: dict[str, Counts]) -> _Slot:
        parts = list(by_router.values())
        flows = flows_together(part.flows for part in parts)
        moved = sum(flow.bytes for flow in flows.values())
        return cls(seconds, Counts.total(parts), flows, moved, by_router)


class History:
    def __init__(self) -> None:
        self._last: dict[str, RouterReport] = {}
        self._last_tick: float | None = None
        self._slots: deque[_Slot] = deque(maxlen=round(RECENT_SECONDS / TICK_SECONDS))
        self.points: deque[ChartPoint] = deque(maxlen=POINTS)

    def tick(self, now: float, reports: Mapping[str, RouterReport]) -> None:
        """`now`: seconds of a monotonic clock."""
        by_router = {name: self._new(name, report) for name, report in reports.items()}
        before, self._last_tick = self._last_tick, now
        self._last = dict(reports)
        if before is not None and now > before:
            self._slots.append(_Slot.of(now - before, by_router))
            self.points.append(_point(*self._within(WINDOW_SECONDS)))

    def _new(self, name: str, report: RouterReport) -> Counts:
        """A router's counts since the last tick; none, if this is its first report here."""
        before = self._last.get(name)
        if before is None:
            return Counts()
        started_again = report.uptime_seconds < before.uptime_seconds
        return report.counts if started_again else report.counts.since(before.counts)

    def recent(self) -> ChartPoint:
        """Rates of the last 10 s, percentiles of the last minute."""
        rates = self.points[-1] if self.points else ChartPoint()
        latencies = _point(*self._within(RECENT_SECONDS))
        return rates._replace(ttft=latencies.ttft, itl=latencies.itl)

    def router_rates(self, name: str) -> RouterRates:
        slots, seconds = self._within(WINDOW_SECONDS)
        own = [slot.by_router[name] for slot in slots if name in slot.by_router]
        return RouterRates(
            sum(sum(counts.requests) for counts in own) / seconds,
            sum(counts.output_tokens for counts in own) / seconds,
        )

    def flows(self) -> dict[tuple[str, str], FlowRates]:
        """KV between pairs of workers."""
        slots, seconds = self._within(WINDOW_SECONDS)
        moved = flows_together(slot.flows for slot in slots)
        return {
            pair: FlowRates(flow.bytes / seconds, flow.handoffs / seconds) for pair, flow in moved.items()
        }

    def _within(self, seconds: float) -> tuple[list[_Slot], float]:
        """The newest slots that make up `seconds`, and how long they were."""
        taken: list[_Slot] = []
        left = seconds - TICK_SECONDS / 2
        for slot in reversed(self._slots):
            if taken and left <= 0:
                break
            taken.append(slot)
            left -= slot.seconds
        return taken, sum(slot.seconds for slot in taken) or 1.0


def _point(slots: Sequence[_Slot], seconds: float) -> ChartPoint:
    counts = Counts.total(slot.total for slot in slots)
    return ChartPoint(
        Percentiles(*map(counts.ttft.percentile, _SHARES)),
        Percentiles(*map(counts.itl.percentile, _SHARES)),
        sum(counts.requests) / seconds,
        counts.requests.refused / seconds,
        counts.requests.failed / seconds,
        counts.prompt_tokens / seconds,
        counts.output_tokens / seconds,
        sum(slot.kv_bytes for slot in slots) / seconds,
        counts.cached_tokens / counts.prompt_tokens if counts.prompt_tokens else None,
    )
