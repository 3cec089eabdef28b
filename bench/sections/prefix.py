"""The gain of a prefix hit: time to first token with 2,000 of 2,080 tokens cached, against none."""

from __future__ import annotations

import statistics

from bench.context import Context
from bench.figures import Figure, Section
from bench.load import run_now, tokens_config
from loadgen.report import Report
from tests.harness import cluster

PREFIX_TOKENS = 2000
OWN_TOKENS = 80
FLAGS = ("--pool", "process", "--local-prefill", "fallback", "--kv-memory", "1GiB")


def run(context: Context) -> Section:
    requests = context.repeats(9)
    with cluster.run(context.out / "prefix", context.model, *FLAGS) as running:
        base = {"concurrency": 1, "max_tokens": 8, "requests": requests, "warmup_requests": 2}
        whole = {"workload": "plain", "prompt_tokens": PREFIX_TOKENS + OWN_TOKENS}
        cold = run_now(tokens_config(running.grpc, seed=1, **base, **whole))
        shared = {"workload": "shared", "prefix_tokens": PREFIX_TOKENS, "prompt_tokens": OWN_TOKENS}
        # The measured prefix must be cached by then: its first request is left out below.
        warm = run_now(tokens_config(running.grpc, seed=2, **{**base, "requests": requests + 1}, **shared))
    cold_ttft, warm_ttft = _ttft(cold, 0), _ttft(warm, 1)
    cached = statistics.median(record.cached_tokens for record in warm.records[1:])
    note = f"median of {requests}"
    figures = [
        Figure(
            "TTFT cached / TTFT cold", warm_ttft / cold_ttft, "", "≤ 0.12", "2,000 of 2,080 tokens shared"
        ),
        Figure("TTFT cold", cold_ttft * 1e3, "ms", "", note),
        Figure("TTFT cached", warm_ttft * 1e3, "ms", "", note),
        Figure(
            "cached tokens", cached, "tokens", f"≥ {PREFIX_TOKENS - PREFIX_TOKENS % 16}", "of each request"
        ),
    ]
    return Section("prefix", "Prefix hits", figures, {"cold": cold.to_json(), "cached": warm.to_json()})


def _ttft(report: Report, skip: int) -> float:
    return statistics.median(record.ttft for record in report.records[skip:])
