"""The engine's thread, when nothing that waits finds room, and when it has ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.errors import DrainingError
from engine.request import StepOutput
from worker.engine_host import EngineHost


class FullEngine:
    """It has work, and no block for it."""

    has_work = True
    steps = 0

    def __init__(self) -> None:
        self.looks = 0

    def step(self) -> StepOutput:
        self.looks += 1
        return StepOutput([], [], [], 0.0)


def make(engine: Any) -> EngineHost:
    return EngineHost(
        engine, on_output=lambda output: None, on_failure=lambda error: None, step_stall_seconds=5.0
    )


async def test_an_engine_without_room_does_not_spin_and_still_hears():
    engine = FullEngine()
    host = make(engine)
    host.start()
    for _ in range(50):
        assert await asyncio.wait_for(host.call(lambda e: e.steps), 60) == 0
    before = engine.looks
    await asyncio.sleep(0.5)
    assert engine.looks - before < 200, (
        "a core is burnt, and the interpreter is kept from those who free blocks"
    )
    await host.stop()
    assert host.ended_well


async def test_who_comes_too_late_is_told():
    host = make(FullEngine())
    host.start()
    await host.stop()
    with pytest.raises(DrainingError):
        await asyncio.wait_for(host.call(lambda e: e.steps), 60)
