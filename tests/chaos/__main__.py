"""`make chaos FAULTS=1000 SEED=1`: random faults on a real cluster under load, and the table of what they did.

Goes on where the last run with this seed stopped. Exit code 1: a token was lost, doubled or wrong, a client saw an
error, something leaked, or a recovery took longer than its bound.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tests.chaos.campaign import Campaign
from tests.chaos.checker import Checker
from tests.chaos.faults import ROWS, draw_fault
from tests.chaos.results import Result, append, percentile, read, table
from tests.chaos.target import Target
from tests.chaos.workload import Workload
from tests.checkpoints import make_checkpoint
from tests.end_to_end.conftest import run_cluster

OUT = Path("out/chaos")
REPLICAS = 2
FLAGS = ("--pool", "process", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "6MiB")
# A ring so small that every prompt passes through it in parts, and slots are always in use.
SMALL_RING = {"RING_BYTES": 524_288, "SLOT_BYTES": 16_384, "PART_BYTES": 16_384}
console = Console(width=170, highlight=False)


def main(
    faults: Annotated[int, typer.Option(help="Faults in all, with those of earlier runs of this seed.")] = 50,
    seed: Annotated[str, typer.Option(help="Names the schedule.")] = "1",
    kinds: Annotated[str, typer.Option(help="Only these rows, comma separated.")] = "",
    baton_clients: Annotated[int, typer.Option()] = 5,
    openai_clients: Annotated[int, typer.Option()] = 2,
    out: Annotated[Path, typer.Option(help="Directory of results and logs.")] = OUT,
) -> None:
    names = [name.strip() for name in kinds.split(",") if name.strip()] or list(ROWS)
    results_file = out / "results.jsonl"
    done = read(results_file, seed)
    if done:
        console.print(f"seed {seed}: {len(done)} faults done before")
    first = max((one.number for one in done), default=-1) + 1

    def on_result(result: Result) -> None:
        done.append(result)
        append(results_file, result)
        console.print(line(result, faults))

    for name, value in SMALL_RING.items():
        os.environ[f"BATON_TRANSFER__{name}"] = str(value)
    if first < faults:
        with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
            plan = Plan(seed, first, faults, names, baton_clients, openai_clients, out)
            run(Path(scratch), plan, on_result)
    console.print(table(done))
    if problems := verdict(done):
        console.print("\n".join(problems), style="red")
        raise typer.Exit(1)


@dataclass(frozen=True)
class Plan:
    """Faults `first` … `faults` of a seed's schedule."""

    seed: str
    first: int
    faults: int
    names: list[str]
    baton_clients: int
    openai_clients: int
    out: Path


def run(scratch: Path, plan: Plan, on_result: Callable[[Result], None]) -> None:
    """A cluster, a workload and a campaign; the cluster's logs are kept."""
    model = make_checkpoint(scratch / "model")
    replicas = str(REPLICAS)
    counts = ("--routers", replicas, "--prefill", replicas, "--decode", replicas)
    with run_cluster(scratch / "cluster", model, *FLAGS, *counts) as cluster:
        target = Target(scratch / "cluster" / "state.json", REPLICAS)
        checker = Checker(model)
        try:
            asyncio.run(_campaign(target, checker, plan, on_result))
        finally:
            checker.close()
            kept = plan.out / "logs" / f"{plan.seed}-{plan.first}"
            shutil.copytree(cluster.state["logs"], kept, dirs_exist_ok=True)
            shutil.copy(scratch / "cluster" / "up.log", kept)


async def _campaign(
    target: Target, checker: Checker, plan: Plan, on_result: Callable[[Result], None]
) -> None:
    workload = Workload(
        target.grpc,
        target.http,
        checker,
        baton_clients=plan.baton_clients,
        openai_clients=plan.openai_clients,
        seed=f"{plan.seed}:{plan.first}",
    )
    campaign = Campaign(target, workload, plan.seed, on_result, plan.out / "wrong.jsonl")
    await campaign.run(draw_fault(plan.seed, n, plan.names) for n in range(plan.first, plan.faults))


def line(result: Result, faults: int) -> str:
    """Progress, and everything that went wrong."""
    held = f" {result.hold:.1f} s" if result.hold else ""
    text = (
        f"{result.number + 1}/{faults} {result.fault}{held}: {result.in_flight} in flight, {result.hit} hit, "
        f"recovery {result.recovery:.2f} s, whole after {result.whole_again:.1f} s, reclaimed after "
        f"{result.quiet:.1f} s, "
        f"{result.requests} requests, {result.tokens} tokens, near-ties {result.near_ties}"
    )
    if result.lost or result.doubled or result.wrong:
        text += f" [red]lost {result.lost} doubled {result.doubled} wrong {result.wrong}[/red]"
    return text + "".join(f"\n   [red]{what}[/red]" for what in [*result.errors, *result.leaks])


def verdict(results: list[Result]) -> list[str]:
    """What breaks a promise."""
    problems = [
        f"{one.fault} (number {one.number}): broken promise"
        for one in results
        if one.lost or one.doubled or one.wrong or one.errors or one.leaks
    ]
    for name, row in ROWS.items():
        recoveries = [one.recovery for one in results if one.fault == name]
        if row.bound_seconds is not None and percentile(recoveries, 0.99) > row.bound_seconds:
            problems.append(f"{name}: recovery p99 {percentile(recoveries, 0.99):.2f} s")
    return problems


if __name__ == "__main__":
    typer.run(main)
