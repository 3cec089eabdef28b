"""Phases of a worker, and the probes' answers in each of them."""

from __future__ import annotations

import asyncio

from worker.health import Health, Phase


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def serving(clock: Clock) -> Health:
    health = Health("w", 10.0, clock)
    for phase in (Phase.WARMING_UP, Phase.STARTING, Phase.SERVING):
        health.to(phase)
    return health


def test_a_worker_is_ready_only_while_it_serves() -> None:
    health = Health("w", 10.0, Clock())
    for phase in (Phase.LOADING, Phase.WARMING_UP, Phase.STARTING):
        health.to(phase)
        assert health.why_not_ready() == [phase.value]
        assert health.why_not_live() == []  # loading is no fault
    health.to(Phase.SERVING)
    assert health.why_not_ready() == []
    health.to(Phase.DRAINING)
    assert health.draining and health.why_not_ready() == [Phase.DRAINING.value]
    assert health.why_not_live() == []  # it must not be killed for that


def test_what_is_being_done_is_a_part_of_the_reason() -> None:
    health = Health("w", 10.0, Clock())
    health.to(Phase.WARMING_UP)
    health.describe("kernels are compiled: 3 of 12, of prompts")
    assert health.why_not_ready() == [f"{Phase.WARMING_UP.value}: kernels are compiled: 3 of 12, of prompts"]
    health.to(Phase.STARTING)
    assert health.why_not_ready() == [Phase.STARTING.value]


def test_draining_is_for_good() -> None:
    health = serving(Clock())
    health.to(Phase.DRAINING)
    health.to(Phase.SERVING)
    health.to(Phase.DRAINING)
    assert health.why_not_ready() == [Phase.DRAINING.value]
    health.to(Phase.LEAVING)
    health.to(Phase.DRAINING)
    assert health.phase is Phase.LEAVING and health.draining


def test_an_unregistered_worker_is_live_and_not_ready() -> None:
    health = serving(Clock())
    health.watch(engine_moves=lambda: True, registered=lambda: False)
    assert "not registered" in health.why_not_ready()[0]
    assert health.why_not_live() == []


def test_a_silent_head_of_ray_is_a_warning_only() -> None:
    health = serving(Clock())
    health.watch(
        engine_moves=lambda: True, registered=lambda: True, ray_head_silent=lambda: "Ray's head is silent"
    )
    assert health.why_not_ready() == [] == health.why_not_live()
    assert health.warnings() == ["Ray's head is silent: this worker serves, and is not replaced if it ends"]
    health.watch(engine_moves=lambda: True, registered=lambda: True)
    assert health.warnings() == []


def test_a_hung_engine_is_neither() -> None:
    health = serving(Clock())
    health.watch(engine_moves=lambda: False, registered=lambda: True)
    assert "engine" in health.why_not_live()[0]
    assert health.why_not_ready() == health.why_not_live()


async def test_a_loop_that_stands_still_is_not_live() -> None:
    clock = Clock()
    health = serving(clock)
    clock.now = 11.0
    assert "event loop" in health.why_not_live()[0]
    ticking = asyncio.create_task(health.tick())
    await asyncio.sleep(0)
    assert health.why_not_live() == []
    ticking.cancel()
