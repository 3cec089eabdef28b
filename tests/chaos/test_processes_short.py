"""Processes of routers as victims, on a whole cluster under load. `make chaos-processes` has the long runs."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.chaos_cluster import ChaosCluster, run_chaos_cluster
from tests.chaos.checker import Checker
from tests.chaos.faults import FaultInjector
from tests.chaos.results import Result
from tests.chaos.rows import ANY_MOMENT, ROWS, draw_fault
from tests.chaos.workload import Workload
from tests.harness.bounds import allowed

SEED = "short processes"
PROCESSES = 2
# (row, point)
FAULTS = (
    ("kill router process", "router.token"),
    ("kill router process", "router.placed"),
    ("kill router process", ANY_MOMENT),
    ("stop router process", ANY_MOMENT),
    ("kill router parent", ANY_MOMENT),
)
HOLD_SECONDS = 5.5


@pytest.mark.long
@pytest.mark.timeout(300)
def test_processes_that_die_or_stop_lose_no_token_and_leave_nothing(checkpoint, tmp_path):
    model = checkpoint("llama")
    results: list[Result] = []
    with run_chaos_cluster(tmp_path / "chaos", model, processes=PROCESSES) as cluster:
        checker = Checker(model)
        try:
            asyncio.run(_campaign(cluster, checker, results, tmp_path / "wrong.jsonl"))
        finally:
            checker.close()
    assert [(result.fault, result.point) for result in results] == list(FAULTS)
    for result in results:
        assert (result.lost, result.doubled, result.wrong) == (0, 0, 0), result
        assert not result.errors and not result.leaks and result.tokens > 0, result
        bound = ROWS[result.fault].bound_seconds
        assert bound is not None and result.recovery <= allowed(bound), result


async def _campaign(cluster: ChaosCluster, checker, results, evidence) -> None:
    target = cluster.target
    workload = Workload(target.grpc, target.http, checker, baton_clients=3, openai_clients=1, seed=SEED)
    injector = FaultInjector(target, workload, cluster.orders, cluster.network)
    schedule = [
        dataclasses.replace(
            draw_fault(SEED, number, [row]), point=point, at=1 + number, hold_seconds=HOLD_SECONDS
        )
        for number, (row, point) in enumerate(FAULTS)
    ]
    await Campaign(target, workload, injector, SEED, results.append, evidence).run(schedule)
