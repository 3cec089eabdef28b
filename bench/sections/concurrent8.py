"""Eight users at once, 512 tokens in and 64 out, alone and with most of the prompt shared: the workloads that
other servers are compared by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.checkpoint import SHAPE
from bench.context import Context
from bench.figures import Figure, Section
from bench.load import run_now, tokens_config
from loadgen.report import Report
from tests.harness import cluster

WORKLOADS: dict[str, dict[str, Any]] = {
    "concurrent8": {"workload": "plain", "prompt_tokens": 512},
    "concurrent8_shared": {"workload": "shared", "prefix_tokens": 448, "prompt_tokens": 64},
}
COMMON: dict[str, Any] = {"concurrency": 8, "max_tokens": 64, "warmup_requests": 8}
REQUESTS = 64
ARRANGEMENTS: dict[str, tuple[str, ...]] = {
    "aggregated": ("--local-prefill", "always", "--decode", "1", "--threads", "2"),
    "split, fallback": ("--local-prefill", "fallback"),
    "split, auto": ("--local-prefill", "auto"),
}
EVERYWHERE = ("--pool", "process", "--kv-memory", "1GiB")


def run(context: Context) -> Section:
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for arrangement, flags in ARRANGEMENTS.items():
        context.say(f"concurrent8, {arrangement}")
        folder = context.out / "concurrent8"
        with cluster.run(folder, context.model, *EVERYWHERE, *flags) as running:
            for workload, settings in WORKLOADS.items():
                report = measure(running.grpc, settings, REQUESTS // (4 if context.quick else 1))
                figures += figures_of(f"{workload}, {arrangement}", report)
                details[f"{workload}, {arrangement}"] = report.to_json()
    floor = SHAPE.decode_weight_bytes / context.limits.read_bytes
    figures.append(Figure("weight-read floor", floor * 1e3, "ms", "", "weights over memory bandwidth"))
    return Section("concurrent8", "Eight users at once", figures, details)


def measure(target: str, settings: dict[str, Any], requests: int, seed: int = 0) -> Report:
    return run_now(tokens_config(target, requests=requests, seed=seed, **COMMON, **settings))


def figures_of(name: str, report: Report) -> Iterator[Figure]:
    yield Figure(f"{name}: output", report.output_tokens_per_second, "tok/s")
    yield Figure(f"{name}: TTFT p50", report.ttft.p50 * 1e3, "ms")
    yield Figure(f"{name}: ITL p50", report.itl.p50 * 1e3, "ms")
    yield Figure(f"{name}: ITL p99", report.itl.p99 * 1e3, "ms")
