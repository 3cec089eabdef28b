"""Routers in front of many stub workers: what the fleet itself costs, and a request beside it.

All are real processes with one Redis; one process serves the stub workers, each registered with a lease of its own and
with a listener for links. First no requests are sent, then a load that the machine carries easily, then three times that
load. The difference, divided by the requests, is what a request costs Redis and the routers; for Redis it is an upper
bound, because a router settles at most 20 times per second, so that at these rates nearly every request has a settlement
of its own. All processes share the machine: processor time is the figure, and latencies only show that nothing waits.
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import psutil

from bench.context import Context
from bench.figures import Figure, Section
from bench.load import run_now, tokens_config
from cluster.redis.embedded import EmbeddedRedis
from loadgen.report import Report
from tests.harness import router_process
from tests.harness.router_process import NAMESPACE, RunningRouter
from tests.harness.waiting import wait_for

ROUTERS = 16  # where the machine has the cores
# Each router takes a tenth of a core for a thousand workers, and the stubs as much for each router.
ROUTERS_PER_CORE = 2
PAIRS = 500  # a prefill and a decode worker each, where the machine has the cores
PAIRS_PER_CORE = 50  # the stubs of 1,000 workers fill a core with leases and beats before the first request
READY_SECONDS = 180.0
SECONDS = 30.0
RATES = (16.0, 48.0)  # requests per second: what does not grow with them is not a request's
PROMPT_TOKENS = 512
MAX_TOKENS = 16


@dataclass(frozen=True)
class Shares:
    """Of a core, by what ran: over one stretch of time."""

    redis: float
    routers: float  # of one router, their mean
    workers: float  # of the stubs' process


def run(context: Context) -> Section:
    out = context.out / "fleet"
    routers_wanted = min(ROUTERS, ROUTERS_PER_CORE * (psutil.cpu_count() or 1))
    pairs = min(PAIRS, (20 if context.quick else PAIRS_PER_CORE) * (psutil.cpu_count() or 1))
    with contextlib.ExitStack() as stack:
        redis = EmbeddedRedis.start(out.absolute() / "redis")
        stack.callback(redis.stop)
        context.say(f"fleet: {2 * pairs} stub workers register")
        stubs = stack.enter_context(_stubs(redis.url, pairs))
        workers = 2 * pairs
        settings = {
            "redis_url": redis.url, "namespace": NAMESPACE, "model": str(context.model), "served_model_name": "bench",
        }  # fmt: skip
        routers = []
        for number in range(routers_wanted):
            context.say(f"fleet: router {number + 1} of {routers_wanted} starts")
            routers.append(stack.enter_context(router_process.run_router(out / f"router-{number}", settings)))
        for one in routers:
            wait_for(partial(_sees, one, workers), READY_SECONDS, f"{workers} workers at {one.http}")
        # the first request to a worker opens its link, the first of a router fills its caches
        _load(routers, context.seconds(SECONDS), RATES[0], [])
        processes = (psutil.Process(redis.pid), [psutil.Process(one.pid) for one in routers], stubs)
        context.say("fleet: no requests")
        quiet = _watched(*processes, lambda: time.sleep(context.seconds(SECONDS)))
        busy = []
        for rate in RATES:
            context.say(f"fleet: {rate:.0f} requests per second")
            reports: list[Report] = []
            load = partial(_load, routers, context.seconds(SECONDS), rate, reports)
            busy.append((_watched(*processes, load), reports[0]))
        memory = max(one.memory_info().rss for one in processes[1])
    title = f"{len(routers)} routers in front of {workers} stub workers"
    return Section("fleet", title, _figures(quiet, busy, memory, len(routers)))


def _figures(
    quiet: Shares, busy: Sequence[tuple[Shares, Report]], memory: int, routers: int
) -> Sequence[Figure]:
    (low, less), (high, more) = busy
    slow, fast = (len(report.answered) / report.seconds for report in (less, more))
    redis_request = (high.redis - low.redis) / (fast - slow)
    return [
        Figure("Redis, no requests", quiet.redis, "of a core"),
        Figure("a router, no requests", quiet.routers, "of a core", note=f"mean of {routers}"),
        Figure("all workers, no requests", quiet.workers, "of a core", note="leases and links of the stubs"),
        Figure("a router's memory", memory / 2**20, "MiB", note="of the largest"),
        Figure(
            "requests",
            fast,
            "per second",
            note=f"prompts of {PROMPT_TOKENS}, {MAX_TOKENS} tokens; none failed",
        ),
        Figure("Redis", high.redis, "of a core", note=f"{low.redis:.3f} at {slow:.0f} requests/s"),
        Figure("Redis, per request", redis_request * 1e6, "µs", note="by the difference of the two rates"),
        Figure("a router, per request", (high.routers - low.routers) * routers / (fast - slow) * 1e6, "µs"),
        Figure("TTFT p50", more.ttft.p50 * 1e3, "ms"),
        Figure("TTFT p99", more.ttft.p99 * 1e3, "ms"),
    ]


@contextlib.contextmanager
def _stubs(redis_url: str, pairs: int) -> Iterator[psutil.Process]:
    """The process of all stub workers, once they are registered."""
    command = ["-m", "tests.harness.stub_workers", "--redis-url", redis_url, "--namespace", NAMESPACE]
    with router_process.python(*command, "--pairs", str(pairs)) as process:
        assert process.stdout is not None, "nothing is logged: it is a pipe"
        process.stdout.readline()
        yield psutil.Process(process.pid)


def _sees(router: RunningRouter, workers: int) -> bool:
    with urllib.request.urlopen(f"{router.http}/v1/cluster", timeout=20) as answer:
        return len(json.load(answer)["workers"]) >= workers


def _load(routers: Sequence[RunningRouter], seconds: float, rate: float, reports: list[Report]) -> None:
    settings = tokens_config(
        routers[0].grpc,
        prompt_tokens=PROMPT_TOKENS,
        max_tokens=MAX_TOKENS,
        rate=rate,
        seconds=seconds,
        seed=int(rate),
    )
    reports.append(run_now(settings.model_copy(update={"targets": tuple(one.grpc for one in routers)})))


def _watched(
    redis: psutil.Process,
    routers: Sequence[psutil.Process],
    stubs: psutil.Process,
    work: Callable[[], object],
) -> Shares:
    before, began = [_cpu(one) for one in (redis, *routers, stubs)], time.monotonic()
    work()
    seconds = time.monotonic() - began
    used = [_cpu(one) - was for one, was in zip((redis, *routers, stubs), before, strict=True)]
    return Shares(used[0] / seconds, sum(used[1:-1]) / len(routers) / seconds, used[-1] / seconds)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
