"""One fault of each of the commonest kinds, on a whole cluster under load. `make chaos` does the long runs."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.checker import Checker
from tests.chaos.faults import draw_fault
from tests.chaos.results import Result
from tests.chaos.target import Target
from tests.chaos.workload import Workload
from tests.end_to_end.conftest import run_cluster

FLAGS = ("--pool", "process", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "6MiB")
WHOLE = ("--routers", "2", "--prefill", "2", "--decode", "2")
SEED = "short"
KINDS = ("cancel", "kill decode", "stop decode", "kill prefill", "kill redis")
HOLD_SECONDS = 5.5  # lost, and found again


@pytest.mark.timeout(300)
def test_faults_lose_no_token_break_no_stream_and_leave_nothing(checkpoint, tmp_path, monkeypatch):
    for name, value in (("RING_BYTES", 524_288), ("SLOT_BYTES", 16_384), ("PART_BYTES", 16_384)):
        monkeypatch.setenv(f"BATON_TRANSFER__{name}", str(value))
    model = checkpoint("llama")
    results: list[Result] = []
    with run_cluster(tmp_path / "cluster", model, *FLAGS, *WHOLE):
        target = Target(tmp_path / "cluster" / "state.json", 2)
        checker = Checker(model)
        try:
            asyncio.run(_campaign(target, checker, results, tmp_path / "wrong.jsonl"))
        finally:
            checker.close()
    assert [result.fault for result in results] == list(KINDS)
    for result in results:
        assert (result.lost, result.doubled, result.wrong) == (0, 0, 0), result
        assert not result.errors, result
        assert not result.leaks, result
        assert result.tokens > 0, result


async def _campaign(target, checker, results, evidence) -> None:
    workload = Workload(target.grpc, target.http, checker, baton_clients=3, openai_clients=1, seed=SEED)
    schedule = [
        dataclasses.replace(draw_fault(SEED, number, [kind]), hold_seconds=HOLD_SECONDS)
        for number, kind in enumerate(KINDS)
    ]
    await Campaign(target, workload, SEED, results.append, evidence).run(schedule)
