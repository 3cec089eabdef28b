"""One tree's times: its engine by itself, then a cluster of one worker of each role, over HTTP.

The load generator is this tree's for both: the same client, so that only servers differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.load import run_now, tokens_config
from bench.pairs.ratios import Sample
from loadgen.report import Report
from tests.harness import cluster

PROBE = Path("bench/pairs/engine_probe.py")  # each tree's own: modules have other names in older trees
PROBE_SECONDS = 120.0
FLAGS = ("--pool", "process", "--local-prefill", "fallback", "--kv-memory", "512MiB", "--dtype", "bfloat16")


@dataclass(frozen=True)
class Effort:
    """The size of one measurement; both trees of a pair together take up to a minute."""

    prompt_tokens: int = 512
    prefills: int = 5
    steps: int = 40
    handoffs: int = 6
    shorts: int = 40
    crowd: int = 16
    answer_tokens: int = 48

    @classmethod
    def quick(cls) -> Effort:
        return cls(prompt_tokens=128, prefills=2, steps=8, handoffs=2, shorts=6, crowd=4, answer_tokens=16)


def measure(tree: Path, model: Path, out: Path, effort: Effort) -> Sample:
    """Seconds by figure. Raises RuntimeError when the tree does not serve."""
    return {**_engine(tree, model, effort), **_served(tree, model, out, effort)}


def _engine(tree: Path, model: Path, effort: Effort) -> Sample:
    sizes = (effort.prompt_tokens, effort.prefills, effort.steps)
    command = [sys.executable, str(tree / PROBE), str(model), *map(str, sizes)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, check=False, cwd=tree, env=environment, capture_output=True, text=True, timeout=PROBE_SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"the engine of {tree} did not run:\n{done.stderr[-2000:]}")
    found: Sample = json.loads(done.stdout.splitlines()[-1])
    return found


def _served(tree: Path, model: Path, out: Path, effort: Effort) -> Sample:
    with cluster.run(out, model, *FLAGS, tree=tree) as running:
        handoff = _ask(running.http, effort.handoffs, 1, effort.prompt_tokens, 2)
        short = _ask(running.http, effort.shorts, 1, 16, 1)
        crowd = _ask(running.http, effort.crowd, 8, 32, effort.answer_tokens)
    tokens = effort.crowd * effort.answer_tokens
    return {
        f"hand-off left after a prefill of {effort.prompt_tokens}": handoff.stages[
            "handoff_exposed_seconds"
        ].p50,
        f"first token after {effort.prompt_tokens}": handoff.ttft.p50,
        "first token of a short request": short.ttft.p50,
        "between tokens, 8 streams": crowd.tpot.p50,
        "an output token's share of the time, 8 streams": crowd.seconds / tokens,
    }


def _ask(target: str, requests: int, concurrency: int, prompt_tokens: int, max_tokens: int) -> Report:
    settings = {"requests": requests, "concurrency": concurrency, "warmup_requests": max(1, concurrency // 2)}
    return run_now(tokens_config(target, prompt_tokens=prompt_tokens, max_tokens=max_tokens, **settings))
