"""Memory beyond a worker's configured data, growth over many requests, and processor time at rest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import psutil

from bench.checkpoint import SHAPE
from bench.context import Context
from bench.figures import Figure, Section
from bench.load import run_now, tokens_config
from tests.harness import cluster
from tests.harness.cluster import Cluster

KV_BYTES = 512 << 20
RING_BYTES = 64 << 20
FLAGS = ("--local-prefill", "fallback", "--kv-memory", "512MiB")
WARM_UP_REQUESTS = 500
REQUESTS = 2000
BATCH = 20  # requests between two readings of the memory
WINDOW = 200
IDLE_SECONDS = 60.0


def run(context: Context) -> Section:
    figures: list[Figure] = []
    with cluster.run(context.out / "memory", context.model, *FLAGS) as running:
        figures += _idle(context, running)
        figures += _growth(context, running)
    return Section("memory", "Memory, and processor time at rest", figures)


def _idle(context: Context, running: Cluster) -> list[Figure]:
    run_now(tokens_config(running.grpc, requests=8, concurrency=2, prompt_tokens=256, max_tokens=16))
    own = [psutil.Process(pid) for pid in running.own_pids]
    others = _ray(own)
    before = [_cpu_seconds(own), _cpu_seconds(others)]
    began = time.monotonic()
    time.sleep(max(10.0, context.seconds(IDLE_SECONDS)))
    passed = time.monotonic() - began
    ours, rays = (
        (_cpu_seconds(group) - spent) / passed for group, spent in zip((own, others), before, strict=True)
    )
    return [
        Figure("cores used at rest, Baton", ours, "cores", "≤ 0.05", f"{len(own)} processes, {passed:.0f} s"),
        Figure("cores used at rest, Ray", rays, "cores", "", f"{len(others)} processes"),
    ]


def _ray(own: Sequence[psutil.Process]) -> list[psutil.Process]:
    """The processes below `baton up` that are not Baton's."""
    pids = {process.pid for process in own}
    return [child for child in own[0].children(recursive=True) if child.pid not in pids]


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes if process.is_running()]
    return sum(spent.user + spent.system for spent in times)


def _growth(context: Context, running: Cluster) -> list[Figure]:
    decode = psutil.Process(running.state["decode"][0]["pid"])
    warm_up, requests = (count // (10 if context.quick else 1) for count in (WARM_UP_REQUESTS, REQUESTS))
    window = WINDOW // (10 if context.quick else 1)
    _requests(running, warm_up, seed=1)
    sizes: list[float] = []
    for number in range(requests // BATCH):
        _requests(running, BATCH, seed=100 + number)
        sizes.append(float(decode.memory_info().rss))
    looks = max(1, window // BATCH)
    first, last = statistics.median(sizes[:looks]), statistics.median(sizes[-looks:])
    beyond = last - SHAPE_BYTES - KV_BYTES - RING_BYTES
    asked = "without weights, KV pool and ring"
    return [
        Figure("decode worker's memory beyond its data", beyond / 1e6, "MB", "≤ 700", asked),
        Figure("growth", (last - first) / 1e6, "MB", "≤ 20", f"median of the last {window} of {requests}"),
        Figure("decode worker's memory", last / 1e6, "MB"),
    ]


# All weights: the matrices, the output head and the embedding, bf16.
SHAPE_BYTES = SHAPE.decode_weight_bytes + 2 * SHAPE.vocab * SHAPE.hidden


def _requests(running: Cluster, count: int, seed: int) -> None:
    """Requests of mixed lengths, so that pools and buffers meet all of them."""
    config = tokens_config(
        running.grpc,
        requests=count,
        concurrency=4,
        prompt_tokens=96,
        prompt_spread=0.9,
        max_tokens=8,
        seed=seed,
    )
    run_now(config)
