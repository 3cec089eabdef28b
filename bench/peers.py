"""`python -m bench.peers`: the same workloads against vLLM's CPU build and against us, in turns, in one run.

Our load generator sends the same prompts to every server over OpenAI's HTTP API. The order is A B C D, A B C D: noise of
the machine affects all of them. Reported are medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from bench import machine, report, router_peers, vllm_peer
from bench.context import Context
from bench.figures import Figure, Section
from bench.load import run_now, tokens_config
from bench.sections.concurrent8 import ARRANGEMENTS, COMMON, EVERYWHERE, REQUESTS, WORKLOADS
from loadgen.report import Report
from tests.harness import cluster

SINGLE: dict[str, dict[str, Any]] = {
    "TTFT, 512 tokens": {"prompt_tokens": 512, "max_tokens": 64},
    "TTFT, 2048 tokens": {"prompt_tokens": 2048, "max_tokens": 8},
}
Server = Callable[[], AbstractContextManager[str]]
Measured = dict[str, dict[str, list[float]]]  # server → figure → value of each round


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--environment", type=Path, default=Path("out/peers/vllm"))
    parser.add_argument("--torch-index", default=os.environ.get("TORCH_INDEX", ""))
    parser.add_argument(
        "--router",
        action="store_true",
        help="routers alone, in front of stub workers (bench/router_peers.py)",
    )
    parser.add_argument("--quick", action="store_true", help="short runs, to check that everything works")
    given = parser.parse_args(arguments)
    context = Context(given.out, Console(), given.quick)
    if given.router:
        return router_peers.main(context, given.rounds)
    context.say("installing vLLM, once")
    binaries = vllm_peer.install(given.environment, given.torch_index)
    facts = machine.describe()
    measured = measure(context, _servers(context, binaries), 1 if given.quick else given.rounds)
    section = Section("peers", "Beside vLLM's CPU build", figures(measured), {"rounds": measured})
    command = "python -m bench.peers"
    report.write(given.out, facts, [section], command)
    table = "\n".join(_table(measured)) + "\n"
    (given.out / "peers.md").write_text(table)
    context.console.print(Markdown(table))
    context.console.print(f"[dim]{given.out / 'peers.md'}[/dim]")
    return 0


def _servers(context: Context, binaries: Path) -> dict[str, Server]:
    def ours(flags: tuple[str, ...]) -> Server:
        @contextlib.contextmanager
        def serve() -> Iterator[str]:
            folder = context.out / "peers"
            with cluster.run(folder, context.model, *EVERYWHERE, *flags) as running:
                yield running.http

        return serve

    def vllm() -> AbstractContextManager[str]:
        return vllm_peer.run(binaries, context.model, context.out / "peers" / "vllm.log")

    return {"vLLM": vllm, **{f"Baton, {name}": ours(flags) for name, flags in ARRANGEMENTS.items()}}


def measure(context: Context, servers: dict[str, Server], rounds: int) -> Measured:
    measured: Measured = {name: {} for name in servers}
    for number in range(rounds):
        for name, serve in servers.items():
            context.say(f"round {number + 1} of {rounds}: {name}")
            with serve() as url:
                for figure, value in _one_round(context, url, number):
                    measured[name].setdefault(figure, []).append(value)
    return measured


def _one_round(context: Context, url: str, number: int) -> Iterator[tuple[str, float]]:
    for name, settings in SINGLE.items():
        requests = context.repeats(7)
        single = _load(
            url, number, {**settings, "concurrency": 1, "requests": requests, "warmup_requests": 2}
        )
        yield name, single.ttft.p50
        if settings["max_tokens"] > 8:
            yield "one stream, TPOT", single.tpot.p50
    for name, settings in WORKLOADS.items():
        loaded = _load(
            url, number, {**COMMON, **settings, "requests": REQUESTS // (4 if context.quick else 1)}
        )
        yield f"{name}, output", loaded.output_tokens_per_second
        yield f"{name}, ITL p99", loaded.itl.p99
        yield f"{name}, TTFT p50", loaded.ttft.p50


def _load(url: str, number: int, settings: dict[str, Any]) -> Report:
    # Each round has prompts of its own, the same for every server: none is in a cache from the round before.
    return run_now(tokens_config(url, seed=1000 * (number + 1), **settings))


def figures(measured: Measured) -> list[Figure]:
    """Medians, ours with their ratio to vLLM's."""
    found = []
    base = measured["vLLM"]
    for server, rows in measured.items():
        for name, values in rows.items():
            value, unit = _scaled(name, statistics.median(values))
            ratio = statistics.median(values) / statistics.median(base[name])
            note = "" if server == "vLLM" else f"{ratio:.2f} × vLLM"
            found.append(Figure(f"{server}: {name}", value, unit, note=note))
    return found


def _scaled(name: str, value: float) -> tuple[float, str]:
    return (value, "tok/s") if name.endswith("output") else (value * 1e3, "ms")


def _table(measured: Measured) -> Iterator[str]:
    yield "| | " + " | ".join(measured) + " |"
    yield "|---" * (len(measured) + 1) + "|"
    for name in measured["vLLM"]:
        cells = []
        for rows in measured.values():
            value, unit = _scaled(name, statistics.median(rows[name]))
            cells.append(f"{report.number(value)} {unit}")
        yield f"| {name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
