"""The reason for disaggregation: the effect of long prompts on streams that are being decoded.

Eight streams decode while 2,048-token prompts arrive, Poisson at 0.6 of the prefill worker's capacity. Every
arrangement has the same two cores: a prefill and a decode worker with a thread each, or one worker with two threads that
does both, without chunked prefill and with several budgets of it.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.context import Context
from bench.figures import Figure, Section
from bench.load import checked, run_now, tokens_config
from loadgen.load import run as run_load
from loadgen.report import Report
from tests.harness import cluster
from tests.harness.cluster import Cluster

STREAMS = 8
PROMPT_TOKENS = 2048
LOAD_SHARE = 0.6
SECONDS = 60.0
SETTLE_SECONDS = 3.0
MIN_PROMPTS = 6
STREAM_TOKENS = 1024
KV = ("--pool", "process", "--kv-memory", "2GiB")
SPLIT = ("--local-prefill", "fallback", "--threads", "1")
TOGETHER = ("--local-prefill", "always", "--decode", "1", "--threads", "2")
BUDGETS = (128, 256, 512)


@dataclass(frozen=True)
class Outcome:
    """ITL p99 and p99.9 of the eight streams in seconds, their output tokens per second, and the prompts' TTFT p50 in
    seconds."""

    itl_p99: float
    # Whole prompts stall a stream less often than once in a hundred tokens: only p99.9 shows it.
    itl_p999: float
    output_rate: float
    prompt_ttft: float
    prompts: int


def run(context: Context) -> Section:
    capacity = 0.0
    found: dict[str, Outcome] = {}
    with cluster.run(context.out / "interference", context.model, *KV, *SPLIT) as running:
        capacity = _capacity(running)
        found["disaggregated"] = _median(context, running, capacity)
    for name, flags in _aggregated().items():
        context.say(f"interference, {name}")
        with cluster.run(context.out / "interference", context.model, *KV, *TOGETHER, *flags) as running:
            found[name] = _median(context, running, capacity)
    return Section("interference", "Decoding beside long prompts", _figures(found, capacity))


def _aggregated() -> dict[str, tuple[str, ...]]:
    # The budget must hold a prompt whole where it is not cut.
    whole = ("--no-chunked-prefill", "--max-batch-tokens", str(PROMPT_TOKENS + STREAMS))
    chunked = {f"aggregated, chunks of {budget}": ("--max-batch-tokens", str(budget)) for budget in BUDGETS}
    return {"aggregated, not chunked": whole, **chunked}


def _capacity(running: Cluster) -> float:
    """Prompts per second, one after the other."""
    config = tokens_config(
        running.grpc, concurrency=1, requests=7, warmup_requests=2, prompt_tokens=PROMPT_TOKENS, max_tokens=2
    )
    prefill = [record.stages["prefill_seconds"] for record in run_now(config).records if record.timings]
    return 1.0 / statistics.median(prefill)


def _median(context: Context, running: Cluster, capacity: float) -> Outcome:
    """The median of three runs by ITL p99."""
    # However slow the engine is, some prompts must arrive.
    seconds = SETTLE_SECONDS + max(context.seconds(SECONDS), MIN_PROMPTS / (LOAD_SHARE * capacity))
    runs = [asyncio.run(_once(running, capacity, seconds, seed)) for seed in range(1 if context.quick else 3)]
    return sorted(runs, key=lambda outcome: outcome.itl_p99)[len(runs) // 2]


async def _once(running: Cluster, capacity: float, seconds: float, seed: int) -> Outcome:
    streams: dict[str, Any] = {"concurrency": STREAMS, "prompt_tokens": 64, "max_tokens": STREAM_TOKENS}
    decoding = tokens_config(running.grpc, seconds=seconds, seed=1000 + seed, **streams)
    intruding = tokens_config(
        running.grpc,
        rate=LOAD_SHARE * capacity,
        seconds=seconds,
        seed=2000 + seed,
        prompt_tokens=PROMPT_TOKENS,
        max_tokens=4,
    )
    decoded, prompts = await asyncio.gather(run_load(decoding), run_load(intruding))
    return _outcome(checked(decoded), checked(prompts), seconds)


def _outcome(decoded: Report, prompts: Report, seconds: float) -> Outcome:
    """Count only tokens that came while prompts were arriving: not the start, not the end."""
    gaps: list[float] = []
    tokens = 0
    for record in decoded.records:
        times = [at for at, _ in record.arrivals]
        inside = [SETTLE_SECONDS <= at < seconds for at in times]
        gaps += [gap for gap, counts in zip(record.gaps, inside[1:], strict=True) if counts]
        tokens += sum(inside)
    rate = tokens / (seconds - SETTLE_SECONDS)
    p99, p999 = (float(value) for value in np.percentile(gaps, (99, 99.9)))
    return Outcome(p99, p999, rate, prompts.ttft.p50, prompts.requests)


def _figures(found: dict[str, Outcome], capacity: float) -> list[Figure]:
    split = found["disaggregated"]
    whole = found["aggregated, not chunked"]
    name, chunked = min(
        ((name, outcome) for name, outcome in found.items() if "chunks" in name),
        key=lambda item: item[1].itl_p99,
    )
    best_rate = max(whole.output_rate, chunked.output_rate)
    figures = [
        Figure("ITL p99 / aggregated, not chunked", split.itl_p99 / whole.itl_p99, "", "≤ 0.2"),
        Figure("ITL p99.9 / aggregated, not chunked", split.itl_p999 / whole.itl_p999, ""),
        Figure("ITL p99 / best chunked", split.itl_p99 / chunked.itl_p99, "", "≤ 0.5", name),
        Figure("output rate / the better of those", split.output_rate / best_rate, "", "≥ 0.9"),
        Figure("prefill capacity", capacity, "prompts/s", "", f"{PROMPT_TOKENS} tokens each"),
    ]
    for arrangement, outcome in found.items():
        figures.append(Figure(f"{arrangement}: ITL p99", outcome.itl_p99 * 1e3, "ms"))
        figures.append(Figure(f"{arrangement}: ITL p99.9", outcome.itl_p999 * 1e3, "ms"))
        figures.append(Figure(f"{arrangement}: output", outcome.output_rate, "tok/s", "", "of the 8 streams"))
        note = f"{outcome.prompts} prompts"
        figures.append(
            Figure(f"{arrangement}: TTFT p50 of the prompts", outcome.prompt_ttft * 1e3, "ms", "", note)
        )
    return figures
