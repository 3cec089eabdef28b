"""One fault of each kind at a Redis behind Sentinels, and as a cluster. `make chaos-redis` has the long runs."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.chaos_cluster import ChaosCluster, run_chaos_cluster
from tests.chaos.checker import Checker
from tests.chaos.faults import FaultInjector
from tests.chaos.results import Result
from tests.chaos.rows import ROWS, draw_fault, expanded, redis_of
from tests.chaos.workload import Workload
from tests.harness.bounds import PLACEMENT_BACK_SECONDS, allowed

SEED = "short redis"


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["redis", "redis-cluster"])
def test_no_token_is_lost_whatever_redis_does(checkpoint, tmp_path, kind: str) -> None:
    model, rows = checkpoint("llama"), expanded([kind])
    results: list[Result] = []
    with run_chaos_cluster(tmp_path / "chaos", model, redis=redis_of(rows)) as cluster:
        checker = Checker(model)
        try:
            asyncio.run(_campaign(cluster, checker, rows, results, tmp_path / "wrong.jsonl"))
        finally:
            checker.close()
    assert [result.fault for result in results] == rows
    for result in results:
        assert (result.lost, result.doubled, result.wrong) == (0, 0, 0), result
        assert not result.errors and not result.leaks and result.tokens > 0, result
        assert result.placement_back <= allowed(PLACEMENT_BACK_SECONDS), result
        bound = ROWS[result.fault].bound_seconds
        assert bound is not None and result.recovery <= allowed(bound), result


async def _campaign(cluster: ChaosCluster, checker, rows, results, evidence) -> None:
    target = cluster.target
    workload = Workload(target.grpc, target.http, checker, baton_clients=3, openai_clients=1, seed=SEED)
    injector = FaultInjector(target, workload, cluster.orders, cluster.network, cluster.redis)
    schedule = [draw_fault(SEED, number, [row]) for number, row in enumerate(rows)]
    await Campaign(target, workload, injector, SEED, results.append, evidence).run(schedule)
