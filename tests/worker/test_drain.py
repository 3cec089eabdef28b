"""Draining: when a worker waits, and when it returns which requests to their routers."""

from __future__ import annotations

import asyncio

from worker.drain import drain


class Role:
    """Has `running` requests that take `seconds`, and waiting ones that never begin."""

    def __init__(self, clock: Clock, seconds: float = float("inf"), waiting: int = 0):
        self._clock = clock
        self._ends = clock() + seconds
        self.waiting = waiting
        self.running = 1
        self.returned: list[str] = []

    def idle(self) -> bool:
        if self._clock() >= self._ends:
            self.running = 0
        return self.running + self.waiting == 0

    async def return_waiting(self) -> None:
        if self.waiting:
            self.returned.append(f"waiting at {self._clock():.0f}")
        self.waiting = 0

    async def return_all(self) -> None:
        self.returned.append(f"running at {self._clock():.0f}")
        self.waiting = self.running = 0


class Clock:
    """A second passes with every look."""

    now = -1.0

    def __call__(self) -> float:
        self.now += 0.25
        return self.now


async def leave(role: Role, clock: Clock, *, successor: bool, healthy: bool = True) -> None:
    async def has_successor() -> bool:
        return successor

    async with asyncio.timeout(30):
        await drain(
            role,
            "w",
            healthy=lambda: healthy,
            has_successor=has_successor,
            migrate_seconds=5,
            drain_seconds=12,
            clock=clock,
        )


async def test_requests_that_finish_soon_finish_here() -> None:
    clock = Clock()
    role = Role(clock, seconds=3)
    await leave(role, clock, successor=True)
    assert role.returned == []


async def test_a_long_request_goes_on_at_another_worker() -> None:
    clock = Clock()
    role = Role(clock, waiting=2)
    await leave(role, clock, successor=True)
    waiting, running = role.returned
    assert waiting in ("waiting at 0", "waiting at 1")
    assert running in ("running at 5", "running at 6")


async def test_without_a_successor_it_has_the_whole_limit() -> None:
    clock = Clock()
    role = Role(clock, seconds=9, waiting=0)
    await leave(role, clock, successor=False)
    assert role.returned == []


async def test_the_limit_is_the_limit() -> None:
    clock = Clock()
    role = Role(clock, waiting=1)
    await leave(role, clock, successor=False)
    assert role.returned in (["running at 12"], ["running at 13"])


async def test_a_hung_engine_is_not_waited_for() -> None:
    clock = Clock()
    role = Role(clock)
    await leave(role, clock, successor=False, healthy=False)
    assert role.returned == [] and clock() < 3
