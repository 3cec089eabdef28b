"""`python -m bench.peers`: the same workloads against vLLM's CPU build, llama.cpp and us, in turns, in one run.

Our load generator sends the same prompts to every server over OpenAI's HTTP API. The servers take turns, in every other
round in reverse order: noise of the machine affects all of them. Reported are medians over the rounds, and ratios to each
peer within a round with the 95 % interval of their median.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from bench import gguf_file, llama_peer, machine, report, router_peers, vllm_peer
from bench.context import Context
from bench.figures import Figure, Section
from bench.load import run_now, tokens_config
from bench.pairs.ratios import interval
from bench.sections.concurrent8 import ARRANGEMENTS, COMMON, EVERYWHERE, REQUESTS, WORKLOADS
from loadgen.report import Report
from tests.harness import cluster

SINGLE: dict[str, dict[str, Any]] = {
    "TTFT, 512 tokens": {"prompt_tokens": 512, "max_tokens": 64},
    "TTFT, 2048 tokens": {"prompt_tokens": 2048, "max_tokens": 8},
}
Server = Callable[[], AbstractContextManager[str]]
Measured = dict[str, dict[str, list[float]]]  # server → figure → value of each round
VLLM, LLAMA, LLAMA_8 = "vLLM", "llama.cpp, bf16", "llama.cpp, Q8_0"
PEERS = (VLLM, LLAMA, LLAMA_8)
OURS: dict[str, tuple[str, ...]] = {
    **{f"Baton, {name}": flags for name, flags in ARRANGEMENTS.items()},
    "Baton, aggregated, int8": (*ARRANGEMENTS["aggregated"], "--quantization", "int8"),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument(
        "--environments", type=Path, default=Path("out/peers"), help="where peers are installed"
    )
    parser.add_argument(
        "--servers",
        default=";".join((*PEERS, *OURS)),
        help="separated by semicolons; default: %(default)s",
    )
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
    names = [name.strip() for name in given.servers.split(";")]
    if unknown := set(names) - {*PEERS, *OURS}:
        parser.error(
            f"--servers: unknown {', '.join(sorted(unknown))}; there are {'; '.join((*PEERS, *OURS))}"
        )
    facts = machine.describe()
    servers = {name: _server(context, name, given) for name in names}
    for measured in rounds(context, servers, 1 if given.quick else given.rounds):
        title = "Beside vLLM's CPU build and llama.cpp"
        section = Section("peers", title, figures(measured), {"rounds": measured})
        report.write(given.out, facts, [section], "python -m bench.peers")
        table = "\n".join(_tables(measured)) + "\n"
        (given.out / "peers.md").write_text(table)
        context.console.print(Markdown(table))
    context.console.print(f"[dim]{given.out / 'peers.md'}[/dim]")
    return 0


def _server(context: Context, name: str, given: argparse.Namespace) -> Server:
    folder = context.out / "peers"
    if name in OURS:
        return lambda: _baton(context, folder, OURS[name])
    if name == VLLM:
        context.say("installing vLLM, once")
        binaries = vllm_peer.install(given.environments / "vllm", given.torch_index)
        return lambda: vllm_peer.run(binaries, context.model, folder / "vllm.log")
    context.say("compiling llama.cpp, once")
    binary = llama_peer.install(given.environments / "llama.cpp")
    form = name.rpartition(" ")[2].upper()
    file = gguf_file.write(context.model, context.out / f"model-{form}.gguf", form)
    return lambda: llama_peer.run(binary, file, folder / "llama.log")


@contextlib.contextmanager
def _baton(context: Context, folder: Path, flags: Sequence[str]) -> Iterator[str]:
    with cluster.run(folder, context.model, *EVERYWHERE, *flags) as running:
        yield running.http


def rounds(context: Context, servers: dict[str, Server], count: int) -> Iterator[Measured]:
    """Measure all servers, in turns; yield all figures so far after each round."""
    measured: Measured = {name: {} for name in servers}
    for number in range(count):
        turns = list(servers.items())
        for name, serve in turns[:: -1 if number % 2 else 1]:
            context.say(f"round {number + 1} of {count}: {name}")
            with serve() as url:
                for figure, value in _one_round(context, url, number):
                    measured[name].setdefault(figure, []).append(value)
        yield measured


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
    # Random weights write bytes that are no UTF-8, which llama.cpp holds back: one answer of 64 had no text at all.
    return run_now(tokens_config(url, seed=1000 * (number + 1), **settings), may_be_empty=2)


def figures(measured: Measured) -> list[Figure]:
    """Medians; ours with their ratio to every peer's."""
    found = []
    for server, rows in measured.items():
        peers = [] if server in PEERS else _peers(measured)
        for name, values in rows.items():
            value, unit = _scaled(name, statistics.median(values))
            note = "; ".join(f"{peer}: {_ratio(values, measured[peer][name])}" for peer in peers)
            found.append(Figure(f"{server}: {name}", value, unit, note=note))
    return found


def _peers(measured: Measured) -> list[str]:
    return [peer for peer in PEERS if peer in measured]


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of the ratios within each round, and its interval."""
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"


def _scaled(name: str, value: float) -> tuple[float, str]:
    return (value, "tok/s") if name.endswith("output") else (value * 1e3, "ms")


def _tables(measured: Measured) -> Iterator[str]:
    """Lines of Markdown: each server's medians, then the ratios of each of ours to the peers'."""
    yield from _header("median", list(measured))
    for name in next(iter(measured.values())):
        shown = [_scaled(name, statistics.median(rows[name])) for rows in measured.values()]
        yield _row(name, [f"{report.number(value)} {unit}" for value, unit in shown])
    if not (peers := _peers(measured)):
        return
    for server in measured:
        if server in PEERS:
            continue
        yield ""
        yield from _header(f"{server}, over", peers)
        for name, values in measured[server].items():
            yield _row(name, [_ratio(values, measured[peer][name]) for peer in peers])


def _header(first: str, columns: Sequence[str]) -> Iterator[str]:
    yield _row(first, columns)
    yield "|---" * (len(columns) + 1) + "|"


def _row(first: str, cells: Sequence[str]) -> str:
    return f"| {first} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
