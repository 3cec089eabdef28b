"""One fault of each kind at the links of a whole cluster under load. `make chaos-links` has the long runs."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.__main__ import wrong_attempts
from tests.chaos.campaign import Campaign
from tests.chaos.chaos_cluster import ChaosCluster, run_chaos_cluster
from tests.chaos.checker import Checker
from tests.chaos.faults import FaultInjector
from tests.chaos.results import Result
from tests.chaos.rows import ROWS, draw_fault
from tests.chaos.workload import Workload
from tests.harness.bounds import REDISPATCH_SECONDS, allowed

SEED = "short links"
ROWS_OF_LINKS = (
    "link reset 0.2 s",
    "link reset 1 s",
    "link silent both ways 1 s",
    "link silent from the worker 3 s",
    "link reset in a frame",
    "credit lost",
    "attach lost",
    "stop router 10 s",
)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_links_that_break_cost_what_they_may_and_nothing_more(checkpoint, tmp_path):
    model = checkpoint("llama")
    results: list[Result] = []
    with run_chaos_cluster(tmp_path / "chaos", model) as cluster:
        checker = Checker(model)
        try:
            asyncio.run(_campaign(cluster, checker, results, tmp_path / "wrong.jsonl"))
        finally:
            checker.close()
    assert [result.fault for result in results] == list(ROWS_OF_LINKS)
    for result in results:
        assert (result.lost, result.doubled, result.wrong) == (0, 0, 0), result
        assert not result.errors and not result.leaks and result.tokens > 0, result
        assert not wrong_attempts(result, allowed(REDISPATCH_SECONDS)), result
        bound = ROWS[result.fault].bound_seconds
        assert bound is not None and result.recovery <= allowed(bound), result


async def _campaign(cluster: ChaosCluster, checker, results, evidence) -> None:
    target = cluster.target
    workload = Workload(target.grpc, target.http, checker, baton_clients=3, openai_clients=1, seed=SEED)
    injector = FaultInjector(target, workload, cluster.orders, cluster.network)
    schedule = [draw_fault(SEED, number, [row]) for number, row in enumerate(ROWS_OF_LINKS)]
    await Campaign(target, workload, injector, SEED, results.append, evidence).run(schedule)
