"""A router's counts, as they grow and at one moment, as it publishes them to the others; differences and sums of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import Any, Literal, NamedTuple, get_args

import orjson

from router.observe.live.histogram import LatencyHistogram
from router.placement.types import Placed
from wire import common_pb2

MAX_PAIRS = 4096  # of workers; beyond, the pair that moved nothing for longest is deleted
# A pair that has moved nothing for so long is deleted: every router reads the reports of all, and pairs grow with the
# square of the fleet. Longer than the time between two reports.
IDLE_SECONDS = 10.0
MAX_COUNT = 2**63 - 1  # a report is JSON, and with a larger number there would be none
MAX_SUMMED = 2**53  # of another router's report: sums of a thousand routers are JSON too
RouterState = Literal["ready", "not ready", "draining"]
Pair = tuple[str, str]  # prefill worker, decode worker


class PairTraffic(NamedTuple):
    """KV sent from one prefill worker to one decode worker."""

    bytes: int = 0
    handoffs: int = 0

    def plus(self, size: int, handoffs: int) -> PairTraffic:
        return PairTraffic(min(self.bytes + size, MAX_COUNT), self.handoffs + handoffs)


NO_TRAFFIC = PairTraffic()


@dataclass
class Recorder:
    """The counts of one router, which only grow; those of a pair that was deleted begin at 0 again."""

    ttft: LatencyHistogram = field(default_factory=LatencyHistogram)
    itl: LatencyHistogram = field(default_factory=LatencyHistogram)
    output_tokens: int = 0
    # The pair that moved last comes last, in both
    flows: dict[Pair, PairTraffic] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    _moved: dict[Pair, float] = field(default_factory=dict)  # when

    def first_token(self, seconds: float | None) -> None:
        """`seconds`: from the request's arrival. None: the first token of a further choice."""
        self.output_tokens += 1
        if seconds is not None:
            self.ttft.add(seconds)

    def tokens(self, gaps: Sequence[float]) -> None:
        """Further tokens; of each the seconds since the choice's token before."""
        self.output_tokens += len(gaps)
        self.itl.add_all(gaps)

    def handed_over(self, placed: Placed, report: common_pb2.WorkReport) -> None:
        """A worker's report of an attempt; only prefill workers report shipped bytes."""
        if not report.kv_bytes_shipped or placed.prefill is None:
            return
        pair = (placed.prefill.worker_id, placed.decode.worker_id)
        before = self._delete(pair)
        if len(self.flows) >= MAX_PAIRS:
            self._delete(next(iter(self.flows)))
        self.flows[pair] = before.plus(report.kv_bytes_shipped, 1)
        self._moved[pair] = self.clock()

    def keep_only(self, workers: set[str]) -> None:
        """Delete pairs whose workers are both gone."""
        for pair in [pair for pair in self.flows if workers.isdisjoint(pair)]:
            self._delete(pair)

    def delete_idle(self) -> None:
        """All but the last pair: that KV was handed over at all stays known."""
        since = self.clock() - IDLE_SECONDS
        while len(self.flows) > 1 and self._moved[pair := next(iter(self.flows))] < since:
            self._delete(pair)

    def _delete(self, pair: Pair) -> PairTraffic:
        self._moved.pop(pair, None)
        return self.flows.pop(pair, NO_TRAFFIC)


class Requests(NamedTuple):
    """Requests by how they ended. Refused: by a limit, a key or a quota. Failed: by any other error."""

    ok: int = 0
    cancelled: int = 0
    refused: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Counts:
    """Since a router's start, between two of its reports, or of several routers."""

    requests: Requests = Requests()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft: LatencyHistogram = field(default_factory=LatencyHistogram)
    itl: LatencyHistogram = field(default_factory=LatencyHistogram)
    flows: dict[Pair, PairTraffic] = field(default_factory=dict)

    def since(self, earlier: Counts) -> Counts:
        return Counts(
            Requests(*map(sub, self.requests, earlier.requests)),
            self.prompt_tokens - earlier.prompt_tokens,
            self.cached_tokens - earlier.cached_tokens,
            self.output_tokens - earlier.output_tokens,
            self.ttft.since(earlier.ttft),
            self.itl.since(earlier.itl),
            _flows_since(self.flows, earlier.flows),
        )

    @staticmethod
    def total(parts: Iterable[Counts]) -> Counts:
        """Their sum, without flows (`flows_together`), of which there may be thousands."""
        given = list(parts) or [Counts()]
        return Counts(
            Requests(*map(sum, zip(*(part.requests for part in given), strict=True))),
            sum(part.prompt_tokens for part in given),
            sum(part.cached_tokens for part in given),
            sum(part.output_tokens for part in given),
            LatencyHistogram.total(part.ttft for part in given),
            LatencyHistogram.total(part.itl for part in given),
        )


def _flows_since(now: dict[Pair, PairTraffic], then: dict[Pair, PairTraffic]) -> dict[Pair, PairTraffic]:
    """Traffic in between, of the pairs that moved something."""
    moved = {}
    for pair, flow in now.items():
        before = then.get(pair, NO_TRAFFIC)
        if before.handoffs > flow.handoffs:  # the router has deleted the pair, and counts it from zero
            before = NO_TRAFFIC
        if flow.handoffs > before.handoffs:
            moved[pair] = flow.plus(-before.bytes, -before.handoffs)
    return moved


def flows_together(parts: Iterable[Mapping[Pair, PairTraffic]]) -> dict[Pair, PairTraffic]:
    together: dict[Pair, PairTraffic] = {}
    for part in parts:
        for pair, flow in part.items():
            together[pair] = flow.plus(*together.get(pair, NO_TRAFFIC))
    return together


@dataclass(frozen=True)
class RouterReport:
    state: RouterState
    uptime_seconds: float
    in_flight: int
    counts: Counts


def encode(report: RouterReport) -> bytes:
    counts = report.counts
    return orjson.dumps(
        {
            "state": report.state,
            "uptime_seconds": round(report.uptime_seconds, 3),
            "in_flight": report.in_flight,
            "requests": list(counts.requests),
            "prompt_tokens": counts.prompt_tokens,
            "cached_tokens": counts.cached_tokens,
            "output_tokens": counts.output_tokens,
            "ttft": counts.ttft.to_pairs(),
            "itl": counts.itl.to_pairs(),
            "flows": [[*pair, flow.bytes, flow.handoffs] for pair, flow in counts.flows.items()],
        }
    )


def decode(raw: bytes) -> RouterReport | None:
    """None for a report in the form of another version."""
    try:
        fields: dict[str, Any] = orjson.loads(raw)
        return RouterReport(
            fields["state"] if fields["state"] in get_args(RouterState) else "not ready",
            _number(fields["uptime_seconds"], MAX_SUMMED),
            int(_number(fields["in_flight"], MAX_SUMMED)),
            _decode_counts(fields),
        )
    except (KeyError, ValueError, TypeError, IndexError):
        return None


def _number(value: Any, most: int) -> float:
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise ValueError(f"{value!r} is not a number in 0 … {most}")
    return float(value)


def _count(value: Any, most: int = MAX_SUMMED) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no count")
    _number(value, most)
    return value


def _histogram(pairs: Any) -> LatencyHistogram:
    return LatencyHistogram.from_pairs((bucket, _count(count)) for bucket, count in pairs)


def _decode_counts(fields: dict[str, Any]) -> Counts:
    return Counts(
        Requests(*map(_count, fields["requests"])),
        _count(fields["prompt_tokens"]),
        _count(fields["cached_tokens"]),
        _count(fields["output_tokens"]),
        _histogram(fields["ttft"]),
        _histogram(fields["itl"]),
        _decode_flows(fields["flows"]),
    )


def _decode_flows(raw: Any) -> dict[Pair, PairTraffic]:
    """Without a call for each number: reports of all routers have tens of thousands of them."""
    flows = {}
    for sender, receiver, size, handoffs in raw:
        if type(size) is not int or type(handoffs) is not int:
            raise TypeError(f"{size!r}, {handoffs!r}: no counts")
        if not (0 <= size <= MAX_COUNT and 0 <= handoffs <= MAX_SUMMED):
            raise ValueError(f"{size} or {handoffs} is out of range")
        flows[str(sender), str(receiver)] = PairTraffic(size, handoffs)
    return flows
