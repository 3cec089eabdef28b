"""Processor time per streamed token and per request at the router, beside the commit before tokens came over links.

Pairs of runs in alternating order: the other commit's router in front of its stub workers, then this tree's. Loads are
fixed and unsaturated, so processor time is the figure; the ratios of pairs hold on a noisy machine, single values do not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.context import Context
from bench.figures import Figure, Section
from bench.pairs.ratios import Ratio, Sample, ratios
from bench.pairs.trees import checked_out

BASE = "8975e45d"  # every attempt had streams of its own
PAIRS = 5
PROBES = Path("bench/probes").absolute()
RUN_SECONDS = 240.0
SECONDS = 6.0


@dataclass(frozen=True)
class Load:
    """The load of one run; `bounds` by figure, as ratios to the other commit."""

    name: str
    flags: tuple[str, ...]
    bounds: dict[str, str]


ROUTER, WORKER, REQUEST, TTFT = (
    "router µs per token",
    "worker µs per token",
    "router µs per request",
    "TTFT p50 ms",
)
COMPARED = (
    Load("HTTP, 256 streams, 1 worker", ("--streams", "256"), {ROUTER: "≤ 0.10", WORKER: "≤ 0.15"}),
    Load("HTTP, 256 streams, 64 workers", ("--streams", "256", "--workers", "64"), {ROUTER: "≤ 0.20"}),
    Load("gRPC, 256 streams, 1 worker", ("--streams", "256", "--protocol", "grpc"), {ROUTER: "≤ 0.35"}),
    Load("requests, uncached", (), {REQUEST: "≤ 0.30", TTFT: "≤ 0.5"}),
    Load("requests, cached prefix", ("--cached",), {REQUEST: "≤ 0.20", TTFT: "≤ 0.35"}),
)
STREAMS = (1, 8, 64, 1000)


def run(context: Context) -> Section:
    figures: list[Figure] = []
    with checked_out(BASE, context.out / "token_path") as base:
        trees = {"base": base.path, "new": Path.cwd()}
        for load in COMPARED:
            context.say(f"token_path: {load.name}")
            pairs = []
            for number in range(context.repeats(PAIRS)):
                order = ("base", "new") if number % 2 == 0 else ("new", "base")
                pair = {name: probe(trees[name], context, *load.flags) for name in order}
                pairs.append((pair["base"], pair["new"]))
            figures += [_figure(load, ratio) for ratio in ratios(pairs) if ratio.name in load.bounds]
    for streams in STREAMS:
        found = probe(Path.cwd(), context, "--streams", str(streams))
        figures.append(Figure(f"HTTP, {streams} streams: {ROUTER}", found[ROUTER], "µs"))
    figures += [figure for protocol in ("http", "grpc") for figure in _counts(context, protocol)]
    most = min(figure.value for figure in figures if figure.unit == "µs")
    figures.append(Figure("streams at 40 tokens/s for 0.7 of a core", 0.7 / (40 * most * 1e-6), "", "≥ 1000"))
    return Section("token_path", "The token path at the router, beside streams per attempt", figures)


def _counts(context: Context, protocol: str) -> list[Figure]:
    """Of this tree's router: what a request makes, which no other process changes."""
    flags = ("--protocol", protocol, "--requests", str(context.repeats(200)))
    found = _run(Path.cwd(), "request_calls.py", context, *flags)
    return [Figure(f"{protocol}, 16 tokens: {name}", value) for name, value in found.items()]


def _figure(load: Load, ratio: Ratio) -> Figure:
    note = f"{ratio.pairs} pairs, 95 % {ratio.low:.2f} … {ratio.high:.2f}; {ratio.base:.1f} → {ratio.new:.1f}"
    return Figure(f"{load.name}: {ratio.name}, new / base", ratio.median, "", load.bounds[ratio.name], note)


def probe(tree: Path, context: Context, *flags: str) -> Sample:
    """Figures of one run of a tree's router. Raises RuntimeError, with its last words, if it fails."""
    return _run(tree, "token_probe.py", context, "--seconds", str(context.seconds(SECONDS)), *flags)


def _run(tree: Path, script: str, context: Context, *flags: str) -> Sample:
    done = subprocess.run(
        [sys.executable, str(PROBES / script), "--model", str(context.model), *flags],
        check=False,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": f"{tree}:{PROBES}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"the probe of {tree} failed:\n{done.stderr[-2000:]}")
    found: Sample = json.loads(done.stdout.splitlines()[-1])
    return found
