"""A few faults on a cluster of their own, and what must hold after each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.campaign import Campaign
from tests.chaos.chaos_cluster import ChaosCluster, run_chaos_cluster
from tests.chaos.checker import Checker
from tests.chaos.faults import FaultInjector
from tests.chaos.results import Result
from tests.chaos.rows import ROWS, Fault
from tests.chaos.workload import Workload
from tests.harness.bounds import allowed


def run_short(
    directory: Path, model: Path, seed: str, schedule: Sequence[Fault], processes: int = 1
) -> list[Result]:
    results: list[Result] = []
    with run_chaos_cluster(directory / "chaos", model, processes=processes) as cluster:
        checker = Checker(model)
        try:
            asyncio.run(_run(cluster, checker, seed, schedule, results, directory / "wrong.jsonl"))
        finally:
            checker.close()
    return results


async def _run(
    cluster: ChaosCluster,
    checker: Checker,
    seed: str,
    schedule: Sequence[Fault],
    results: list[Result],
    evidence: Path,
) -> None:
    target = cluster.target
    workload = Workload(target.grpc, target.http, checker, baton_clients=3, openai_clients=1, seed=seed)
    injector = FaultInjector(target, workload, cluster.orders, cluster.network)
    await Campaign(target, workload, injector, seed, results.append, evidence).run(schedule)


def assert_recovered(result: Result) -> None:
    """No token is lost, doubled or wrong, nothing is left, and the recovery is within the fault's bound."""
    assert (result.lost, result.doubled, result.wrong) == (0, 0, 0), result
    assert not result.errors and not result.leaks and result.tokens > 0, result
    bound = ROWS[result.fault].bound_seconds
    assert bound is not None and result.recovery <= allowed(bound), result
