"""Goodput of a cluster under one, two and three times its capacity.

Prefill workers of a known speed stand behind a real router and a real Redis. An open loop sends requests on a
schedule, whatever happens to them; a request is good if its first token came within the SLO. A cluster that
admits every request serves every request too late: the same load without targets is shown beside it. Of two models
behind one router, a surge of one must leave the other its objective.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from bench.context import Context
from bench.figures import Figure, Section
from bench.load import run_now, tokens_config
from loadgen.config import LoadConfig, Slo
from loadgen.load import run as run_load
from loadgen.report import Report
from tests.harness import router_process as router_setup
from tests.harness.router_process import RouterBench

PAIRS = 2
RATE = 4000.0  # prompt tokens per second of one worker: the workers must be the limit, not the machine
PROMPT_TOKENS = 500
SLO_SECONDS = 1.5
TARGET_SECONDS = 1.2  # the rest is a margin for errors of the estimate
CLIENT_SECONDS = 6.0
SECONDS = 30.0
TIMES = (1, 2, 3)
MODELS = ("bench", "second")
PLACES = 256  # of the router with two models
_TIME_OUTS = {"deadline", "DeadlineError", "grpc_deadline_exceeded", "http_504"}
_REFUSALS = {"OverloadedError", "http_429"}
_CLASSES = ("high", "normal", "batch")
_SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class Measured:
    """One load: requests offered, their results, and the router's peak memory meanwhile."""

    times: int
    seconds: float
    report: Report
    rss_bytes: int

    @property
    def goodput(self) -> float:
        """Good requests per second, until the last one's end: requests still queued at the end do not count."""
        good = sum(record.good for record in self.report.records)
        return good / max(self.seconds, self.report.seconds)

    def failed(self, kinds: set[str]) -> int:
        return sum(count for kind, count in self.report.errors.items() if kind in kinds)

    @property
    def note(self) -> str:
        late = self.report.requests - self.failed(_REFUSALS) - sum(r.good for r in self.report.records)
        return (
            f"{self.report.requests / self.seconds:.0f} requests/s offered, {self.failed(_REFUSALS)} refused, "
            f"{late} late or failed, TTFT p99 {self.report.ttft.p99:.2f} s"
        )


def run(context: Context) -> Section:
    seconds = context.seconds(SECONDS)
    with _cluster(context, TARGET_SECONDS) as bench:
        capacity = _capacity(bench, seconds)
        context.say(f"overload: {capacity:.1f} requests/s is their capacity")
        measured = [_measure(bench, times, capacity, seconds) for times in TIMES]
    with _cluster(context, 0.0) as bench:
        open_door = _measure(bench, TIMES[-1], capacity, seconds)
    surge = list(_surge(context, capacity, seconds))
    note = f"closed loop, {PAIRS} prefill workers of {RATE:,.0f} tokens/s, prompts of {PROMPT_TOKENS}"
    figures = [Figure("capacity", capacity, "requests/s", note=note), *_figures(measured)]
    figures.append(
        Figure("goodput at 3×, without targets", open_door.goodput, "requests/s", note=open_door.note)
    )
    figures += surge
    details = {f"{one.times}x": one.report.to_json() for one in measured}
    return Section("overload", "Overload", figures, details)


def _cluster(context: Context, target_seconds: float) -> contextlib.AbstractContextManager[RouterBench]:
    workers = ("bench.paced", "--pairs", str(PAIRS), "--rate", str(RATE))
    targets = {f"ttft_target_seconds_{name}": target_seconds for name in _CLASSES}
    limits = {"max_concurrent_requests": 4096, "max_concurrent_requests_per_connection": 0}
    return router_setup.run(context.out / "overload", context.model, workers, **targets, **limits)


def _surge(context: Context, capacity: float, seconds: float) -> Iterator[Figure]:
    """Two models with workers of their own behind one router: one is asked for by more clients than the router has places,
    who ask again at once, the other for half of its capacity."""
    workers = ("bench.paced", "--pairs", str(PAIRS), "--rate", str(RATE), "--models", *MODELS)
    second = {"name": MODELS[1], "model": str(context.model)}
    limits = {"max_concurrent_requests": PLACES, "max_concurrent_requests_per_connection": 0}
    targets = {f"ttft_target_seconds_{name}": 0.0 for name in _CLASSES}
    settings = {"models": [second], **limits, **targets}
    with router_setup.run(context.out / "overload-models", context.model, workers, **settings) as bench:
        quiet = _config(bench.http, model=MODELS[1], rate=capacity / 2, seconds=seconds, seed=1)
        surging = _config(bench.http, model=MODELS[0], concurrency=2 * PLACES, seconds=seconds + 2.0)
        alone = asyncio.run(run_load(quiet))
        beside, flood = asyncio.run(_together(quiet, surging))
    refused = sum(count for kind, count in flood.errors.items() if kind in _REFUSALS)
    note = f"beside {2 * PLACES} clients of another model, {refused} of whose {flood.requests} requests were refused"
    good = sum(record.good for record in beside.records) / beside.requests
    yield Figure("good of a quiet model's requests", good, "", "≥ 0.99", note)
    yield Figure("its TTFT p99", beside.ttft.p99, "s", f"≤ {SLO_SECONDS}", f"alone {alone.ttft.p99:.3f} s")
    yield Figure("its refused requests", beside.failed, "requests", "≤ 0", f"{beside.requests} requests")


async def _together(quiet: LoadConfig, surging: LoadConfig) -> tuple[Report, Report]:
    """The quiet load begins once the other has taken what it can."""
    flood = asyncio.ensure_future(run_load(surging))
    await asyncio.sleep(1.0)
    return await run_load(quiet), await flood


def _config(target: str, **settings: Any) -> LoadConfig:
    return tokens_config(
        target,
        prompt_tokens=PROMPT_TOKENS,
        prompt_spread=0.5,
        max_tokens=4,
        timeout_seconds=CLIENT_SECONDS,
        slo=Slo(ttft_seconds=SLO_SECONDS),
        **settings,
    )


def _capacity(bench: RouterBench, seconds: float) -> float:
    """Requests answered per second while a few always wait. The router learns the workers' speed meanwhile."""
    report = run_now(_config(bench.grpc, concurrency=8, seconds=max(seconds, 6.0), warmup_requests=5))
    return len(report.answered) / report.seconds


def _measure(bench: RouterBench, times: int, capacity: float, seconds: float) -> Measured:
    config = _config(bench.grpc, rate=times * capacity, seconds=seconds, seed=times)
    return asyncio.run(_watched(bench.pid, config, times, seconds))


async def _watched(pid: int, config: LoadConfig, times: int, seconds: float) -> Measured:
    router, largest = psutil.Process(pid), 0
    running = asyncio.ensure_future(run_load(config))
    while not running.done():
        largest = max(largest, int(router.memory_info().rss))
        await asyncio.wait([running], timeout=_SAMPLE_SECONDS)
    return Measured(times, seconds, running.result(), largest)


def _figures(measured: list[Measured]) -> Iterator[Figure]:
    for one in measured:
        yield Figure(f"goodput at {one.times}×", one.goodput, "requests/s", note=one.note)
    peak, last = max(one.goodput for one in measured), measured[-1]
    yield Figure("goodput at 3× of its peak", last.goodput / peak, "", "≥ 0.9", f"TTFT ≤ {SLO_SECONDS:.1f} s")
    late = sum(one.failed(_TIME_OUTS) for one in measured)
    yield Figure("time-outs", late, "requests", "≤ 0", f"clients wait {CLIENT_SECONDS:.0f} s")
    other = sum(one.report.failed - one.failed(_TIME_OUTS | _REFUSALS) for one in measured)
    yield Figure("other failures", other, "requests", "≤ 0")
    growth = last.rss_bytes / measured[0].rss_bytes
    yield Figure("router's memory, 3× over 1×", growth, "", "≤ 1.1", f"{last.rss_bytes / 1e6:.0f} MB at most")
