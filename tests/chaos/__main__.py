"""`make chaos FAULTS=1000 SEED=1`: random faults on a real cluster under load, and a table of their effects.

A run goes on where the last one with this seed stopped. Exit code 1: a token was lost, doubled or wrong, a client saw an
error, something leaked, a recovery took longer than its bound, or a long run met a point or a row too seldom.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.faults.points import Point
from tests.chaos.campaign import Campaign
from tests.chaos.chaos_cluster import ChaosCluster, run_chaos_cluster
from tests.chaos.checker import Checker
from tests.chaos.evidence import judged_again
from tests.chaos.faults import FaultInjector
from tests.chaos.form import Form
from tests.chaos.report import bounded, point_hits, row_hits, sheets
from tests.chaos.results import Result, append, percentile, read
from tests.chaos.rows import (
    LINK_POINTS,
    MATRIX,
    ROWS,
    NewAttempts,
    chosen,
    draw_fault,
    expanded,
    redis_of,
    usual,
)
from tests.chaos.workload import Workload
from tests.harness.bounds import PLACEMENT_BACK_SECONDS, REDISPATCH_SECONDS

OUT = Path("out/chaos")
EVIDENCE = "wrong.jsonl"
LONG_RUN = 1000  # faults, of all kinds: from then on every row and point must have been hit this often
MIN_HITS = 30
console = Console(width=170, highlight=False)


def main(
    faults: Annotated[int, typer.Option(help="Faults in all, with those of earlier runs of this seed.")] = 50,
    seed: Annotated[str, typer.Option(help="Names the schedule.")] = "1",
    kinds: Annotated[
        str,
        typer.Option(
            help="Only these rows, with commas and no spaces between; links, processes, redis, redis-cluster: "
            "all of theirs."
        ),
    ] = "",
    baton_clients: Annotated[int, typer.Option()] = 5,
    openai_clients: Annotated[int, typer.Option()] = 2,
    tensor_parallel: Annotated[
        int, typer.Option(envvar="TP", min=1, help="Ranks of each worker; above 1 they are victims too.")
    ] = 1,
    mixed: Annotated[
        bool,
        typer.Option(
            help="Prefill workers of one rank with KV in bf16, decode workers of two with KV in int8."
        ),
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="Processes of each router.")] = 1,
    out: Annotated[Path, typer.Option(help="Directory of results and logs.")] = OUT,
) -> None:
    form = Form(1, 2, mixed=True) if mixed else Form(tensor_parallel, tensor_parallel)
    names = expanded(chosen(kinds)) or usual(form.ranks)
    results_file = out / "results.jsonl"
    done = read(results_file, seed)
    if done:
        console.print(f"seed {seed}: {len(done)} faults done before")
    first = max((one.number for one in done), default=-1) + 1

    def on_result(result: Result) -> None:
        done.append(result)
        append(results_file, result)
        console.print(line(result, faults))

    if first < faults:
        with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
            plan = Plan(seed, first, faults, names, baton_clients, openai_clients, form, processes, out)
            run(Path(scratch), plan, on_result)
    if any(result.wrong for result in done):
        done = judge_again(out, seed, done, form)
    for sheet in sheets(done):
        console.print(sheet.shown())
    (out / "report.md").write_text("\n".join(sheet.markdown() for sheet in sheets(done)))
    if problems := verdict(done, form):
        console.print("\n".join(problems), style="red")
        raise typer.Exit(1)


def judge_again(out: Path, seed: str, done: list[Result], form: Form) -> list[Result]:
    """Results of all faults, streams with wrong tokens compared once more: the comparison may have changed since."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        model = form.checkpoint(Path(scratch) / "model")
        for result in judged_again(out / EVIDENCE, seed, model, done, form.gap):
            append(out / "results.jsonl", result)
    return read(out / "results.jsonl", seed)


@dataclass(frozen=True)
class Plan:
    """Faults `first` … `faults` of a seed's schedule."""

    seed: str
    first: int
    faults: int
    names: list[str]
    baton_clients: int
    openai_clients: int
    form: Form
    processes: int
    out: Path


def run(scratch: Path, plan: Plan, on_result: Callable[[Result], None]) -> None:
    """A cluster, a workload and a campaign; the cluster's logs are kept."""
    model = plan.form.checkpoint(scratch / "model")
    with run_chaos_cluster(
        scratch / "chaos", model, form=plan.form, processes=plan.processes, redis=redis_of(plan.names)
    ) as cluster:
        checker = Checker(model, plan.form.gap)
        try:
            asyncio.run(_campaign(cluster, checker, plan, on_result))
        finally:
            checker.close()
            kept = plan.out / "logs" / f"{plan.seed}-{plan.first}"
            shutil.copytree(cluster.logs, kept, dirs_exist_ok=True)
            shutil.copy(cluster.up_log, kept)


async def _campaign(
    cluster: ChaosCluster, checker: Checker, plan: Plan, on_result: Callable[[Result], None]
) -> None:
    workload = Workload(
        cluster.target.grpc,
        cluster.target.http,
        checker,
        baton_clients=plan.baton_clients,
        openai_clients=plan.openai_clients,
        seed=f"{plan.seed}:{plan.first}",
    )
    injector = FaultInjector(cluster.target, workload, cluster.orders, cluster.network, cluster.redis)
    campaign = Campaign(cluster.target, workload, injector, plan.seed, on_result, plan.out / EVIDENCE)
    await campaign.run(draw_fault(plan.seed, n, plan.names) for n in range(plan.first, plan.faults))


def line(result: Result, faults: int) -> str:
    """Progress, and everything that went wrong."""
    held = f" {result.hold:.1f} s" if result.hold else ""
    text = (
        f"{result.number + 1}/{faults} {result.fault}{_where(result)}{held}: {result.in_flight} in flight, "
        f"{result.hit} hit, "
        + (f"re-dispatched after {result.redispatch:.2f} s, " if result.redispatch else "")
        + (f"{result.lost_attempts} lost, {result.lost_after:.2f} s, " if result.lost_attempts else "")
        + f"recovery {result.recovery:.2f} s, whole after {result.whole_again:.1f} s, reclaimed after "
        f"{result.quiet:.1f} s, "
        + (f"placement back {result.placement_back:.2f} s after Redis, " if result.placement_back else "")
        + f"{result.requests} requests, {result.tokens} tokens, near-ties {result.near_ties}"
    )
    if result.lost or result.doubled or result.wrong:
        text += f" [red]lost {result.lost} doubled {result.doubled} wrong {result.wrong}[/red]"
    return text + "".join(f"\n   [red]{what}[/red]" for what in [*result.errors, *result.leaks])


def _where(result: Result) -> str:
    return "".join(f" ({what})" for what in (result.point, result.way) if what)


def verdict(results: list[Result], form: Form) -> list[str]:
    """What breaks a promise."""
    problems = [
        f"{one.fault} (number {one.number}): broken promise"
        for one in results
        if one.lost or one.doubled or one.wrong or one.errors or one.leaks
    ]
    for name, (bound, mine) in bounded(results).items():
        recovery = percentile([one.recovery for one in mine], 0.99)
        if recovery > bound:
            problems.append(f"{name}: recovery p99 {recovery:.2f} s")
        again = max(one.redispatch for one in mine)
        if again > bound:
            problems.append(f"{name}: re-dispatched after {again:.2f} s")
        back = percentile([one.placement_back for one in mine], 0.99)
        if back > PLACEMENT_BACK_SECONDS:
            problems.append(f"{name}: placement back p99 {back:.2f} s after Redis")
    problems += [problem for one in results if (problem := wrong_attempts(one))]
    tokens, others = sum(one.tokens for one in results), sum(one.near_ties for one in results)
    if tokens - others < form.least_same * tokens:
        problems.append(f"{others} of {tokens} tokens are others than the reference's")
    return problems + (too_few(results) if len(results) >= LONG_RUN else [])


def wrong_attempts(result: Result, seconds: float = REDISPATCH_SECONDS) -> str:
    """What a fault of a link cost that it must not; lost attempts are dispatched again within `seconds`."""
    allowed = ROWS[result.fault].new_attempts if result.fault in ROWS else None
    if allowed is None or not result.lost_attempts:
        return ""
    if allowed is NewAttempts.SOON and result.lost_after <= seconds:
        return ""
    return f"{result.fault} (number {result.number}): {result.lost_attempts} attempts lost, {result.lost_after:.2f} s"


def too_few(results: list[Result]) -> list[str]:
    """What a long run should have met more often."""
    rows = row_hits(results)
    points = {point: counts.total() for point, counts in point_hits(results).items()}
    expected = {
        **{name: rows[name] for name in MATRIX},
        **{one.value: points[one.value] for one in Point if one not in LINK_POINTS},
    }
    return [f"{name}: hit {count} times only" for name, count in expected.items() if count < MIN_HITS]


if __name__ == "__main__":
    typer.run(main)
