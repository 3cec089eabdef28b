"""One fault of each of the commonest kinds, on a whole cluster under load. `make chaos` has the long runs."""

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
from tests.harness.bounds import PLACEMENT_BACK_SECONDS, allowed

SEED = "short"
# (row, point)
FAULTS = (
    ("kill decode, decoding", "decode.tokens"),
    ("corrupt", "landing.landed"),
    ("kill prefill", "sender.written"),
    ("double message", "message.committed"),
    ("stop decode", "landing.landed"),
    ("kill decode, uncommitted", "decode.committing"),
    ("cut prefill–decode", ANY_MOMENT),
    ("kill router", "router.token"),
    ("kill redis", ANY_MOMENT),
)
HOLD_SECONDS = 5.5  # lost, and found again
LATE_SECONDS = 0.3


@pytest.mark.long
@pytest.mark.timeout(300)
def test_faults_lose_no_token_break_no_stream_and_leave_nothing(checkpoint, tmp_path):
    model = checkpoint("llama")
    results: list[Result] = []
    with run_chaos_cluster(tmp_path / "chaos", model) as cluster:
        checker = Checker(model)
        try:
            asyncio.run(_campaign(cluster, checker, results, tmp_path / "wrong.jsonl"))
        finally:
            checker.close()
    assert [(result.fault, result.point) for result in results] == list(FAULTS)
    for result in results:
        assert (result.lost, result.doubled, result.wrong) == (0, 0, 0), result
        assert not result.errors, result
        assert not result.leaks, result
        assert result.tokens > 0, result
        bound = ROWS[result.fault].bound_seconds
        assert bound is not None and result.recovery <= allowed(bound), result
        assert result.placement_back <= allowed(PLACEMENT_BACK_SECONDS), result


async def _campaign(cluster: ChaosCluster, checker, results, evidence) -> None:
    target = cluster.target
    workload = Workload(target.grpc, target.http, checker, baton_clients=3, openai_clients=1, seed=SEED)
    injector = FaultInjector(target, workload, cluster.orders, cluster.network)
    schedule = [
        dataclasses.replace(
            draw_fault(SEED, number, [row]),
            point=point,
            at=1 + number % 3,
            way="both" if row.startswith("cut") else "",
            hold_seconds=LATE_SECONDS if "message" in row else HOLD_SECONDS,
        )
        for number, (row, point) in enumerate(FAULTS)
    ]
    await Campaign(target, workload, injector, SEED, results.append, evidence).run(schedule)
