"""A worker under test detects inconsistent state by itself."""

from __future__ import annotations

import asyncio

import pytest

from engine.engine import Engine
from tests.engine.fake_model import FakeRunner
from tests.harness.waiting import until
from worker import self_check
from worker.engine_host import EngineHost
from worker.self_check import SelfCheck


@pytest.fixture
async def host(monkeypatch):
    monkeypatch.setattr(self_check, "POLL_SECONDS", 0.001)
    runner = FakeRunner(8, max_batch_tokens=64)
    engine = Engine(runner, runner.config, secret=b"s")
    made = EngineHost(
        engine, on_output=lambda output: None, on_failure=lambda error: None, step_stall_seconds=5.0
    )
    made.start()
    yield made
    await made.stop()


async def looked(check: SelfCheck, often: int) -> None:
    await until(lambda: check.count >= often, f"{often} looks")


async def test_consistent_accounts_are_no_failure(host):
    check = SelfCheck(host, lambda: None)
    running = asyncio.create_task(check.run())
    await asyncio.wait_for(looked(check, 3), 60.0)
    running.cancel()
    assert check.failure == ""


async def test_a_block_without_an_owner(host):
    check = SelfCheck(host, lambda: None)
    await host.call(lambda engine: engine._pool.allocate(1))
    await asyncio.wait_for(check.run(), 60.0)
    assert "1 references, and 0 holders" in check.failure


async def test_an_account_of_the_role(host):
    def wrong() -> None:
        raise AssertionError("a slot is lost")

    check = SelfCheck(host, wrong)
    await asyncio.wait_for(check.run(), 60.0)
    assert (check.count, check.failure) == (1, "a slot is lost")
