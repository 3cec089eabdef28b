"""`make soak MINUTES=60`: a mixed load with cancels and faults, and whether memory, descriptors and accounts stay flat.

No worker and no router is killed here (`make chaos` does that): what is watched must live through the whole run. Every
fault is followed by rest, and the accounts must be whole then; what grows is judged between two rests, the median of
the second quarter of the run against that of the last. Prompts come from a finite set: the prefix index keeps an hour
of them, and an endless supply of new ones would grow it for an hour, as it should.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.chaos.__main__ import line
from tests.chaos.campaign import Campaign
from tests.chaos.chaos_cluster import ChaosCluster, run_chaos_cluster
from tests.chaos.checker import Checker
from tests.chaos.faults import FaultInjector
from tests.chaos.flatness import Finding, judge_flatness
from tests.chaos.report import by_kind
from tests.chaos.results import Result
from tests.chaos.rows import Fault, draw_fault
from tests.chaos.samples import Sample, Sampler
from tests.chaos.soak_plot import soak_plot
from tests.chaos.workload import Workload
from tests.harness.checkpoints import make_checkpoint

KINDS = (
    "cancel",
    "corrupt",
    "double message",
    "late message",
    "stall",
    "crowd",
    "stop prefill",
    "stop decode",
    "stop redis",
    "cut prefill–decode",
    "cut router–prefill",
    "cut router–decode",
)
DISTINCT_REQUESTS = 120
SAMPLE_SECONDS = 2.0
console = Console(width=150, highlight=False)


def main(
    minutes: Annotated[float, typer.Option(help="How long the load runs.")] = 60.0,
    seed: Annotated[str, typer.Option()] = "1",
    out: Annotated[Path, typer.Option(help="Directory of samples, plot and logs.")] = Path("out/soak"),
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        model = make_checkpoint(Path(scratch) / "model")
        with run_chaos_cluster(Path(scratch) / "chaos", model) as cluster:
            checker = Checker(model)
            try:
                samples = asyncio.run(_soak(cluster, checker, minutes * 60, seed, results))
            finally:
                checker.close()
                shutil.copytree(cluster.logs, out / "logs", dirs_exist_ok=True)
    findings = judge_flatness(samples)
    faults = [asdict(result) for result in results]
    judged = [asdict(finding) for finding in findings]
    report = {
        "minutes": minutes,
        "samples": [asdict(one) for one in samples],
        "faults": faults,
        "judged": judged,
    }
    (out / "soak.json").write_text(json.dumps(report))
    (out / "soak.svg").write_text(soak_plot(samples))
    console.print(by_kind(results).shown())
    console.print(_judged(findings))
    console.print(f"{out}/soak.json, {out}/soak.svg")
    broken = [one for one in results if one.lost or one.doubled or one.wrong or one.errors or one.leaks]
    for one in broken:
        console.print(line(one, len(results)), style="red")
    raise typer.Exit(1 if broken or not all(finding.flat for finding in findings) else 0)


async def _soak(
    cluster: ChaosCluster, checker: Checker, seconds: float, seed: str, results: list[Result]
) -> list[Sample]:
    workload = Workload(
        cluster.target.grpc,
        cluster.target.http,
        checker,
        baton_clients=4,
        openai_clients=2,
        seed=f"soak:{seed}",
        distinct_requests=DISTINCT_REQUESTS,
    )
    sampler = Sampler(cluster.target)
    until = time.monotonic() + seconds

    def on_result(result: Result) -> None:
        results.append(result)
        sampler.sample(at_rest=True)
        console.print(f"{(until - time.monotonic()) / 60:5.1f} min left  {line(result, len(results))}")

    injector = FaultInjector(cluster.target, workload, cluster.orders, cluster.network)
    with tempfile.TemporaryDirectory() as evidence:
        campaign = Campaign(
            cluster.target, workload, injector, seed, on_result, Path(evidence) / "wrong.jsonl"
        )
        sampling = asyncio.create_task(_sample_now_and_then(sampler))
        try:
            await campaign.run(_schedule(seed, until))
        finally:
            sampling.cancel()
    return sampler.samples


def _schedule(seed: str, until: float) -> Iterator[Fault]:
    number = 0
    while time.monotonic() < until:
        yield draw_fault(f"soak:{seed}", number, KINDS)
        number += 1


async def _sample_now_and_then(sampler: Sampler) -> None:
    while True:
        await asyncio.to_thread(sampler.sample)
        await asyncio.sleep(SAMPLE_SECONDS)


def _judged(findings: list[Finding]) -> Table:
    shown = Table(title="at rest, second quarter against last")
    for column in ("what", "before", "after", "allowed", "flat"):
        shown.add_column(column, justify="left" if column == "what" else "right")
    for one in findings:
        flat = "yes" if one.flat else "[red]no[/red]"
        shown.add_row(one.what, f"{one.before:,.0f}", f"{one.after:,.0f}", f"{one.allowed:,.0f}", flat)
    return shown


if __name__ == "__main__":
    typer.run(main)
