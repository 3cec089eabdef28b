"""How many placements ask Redis at a time, and which of those that wait is next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.protocol.priority import PriorityClass
from router.placement import call_slots
from router.placement.call_slots import CallSlots
from tests.harness.waiting import turns


@asynccontextmanager
async def slot(slots: CallSlots, *of: Any) -> AsyncIterator[bool]:
    taken = await slots.take(*of)
    try:
        yield taken
    finally:
        if taken:
            slots.give()


class Held:
    """Tasks that take a slot and hold it until told."""

    def __init__(self, slots: CallSlots):
        self.slots = slots
        self.order: list[str] = []
        self.most = self.now = 0
        self.leave = asyncio.Event()

    async def hold(self, name: str, priority_class: PriorityClass) -> bool:
        async with slot(self.slots, priority_class) as taken:
            self.now += taken
            self.most = max(self.most, self.now)
            self.order.append(name)
            await self.leave.wait()
            self.now -= taken
            return taken


async def all_free(slots: CallSlots, most: int) -> None:
    """As many as there ever were can be taken again, and no more."""
    held = Held(slots)
    tasks = [asyncio.create_task(held.hold("", "normal")) for _ in range(most + 1)]
    await turns()
    assert held.now == most
    held.leave.set()
    await asyncio.gather(*tasks)


async def test_higher_classes_come_first_and_no_more_than_the_limit_at_a_time() -> None:
    slots = CallSlots(2)
    held = Held(slots)
    first = [asyncio.create_task(held.hold("first", "batch")) for _ in range(2)]
    await turns()
    waiting: list[asyncio.Task[Any]] = []
    classes: list[PriorityClass] = ["batch", "normal", "high", "normal"]
    for number, one in enumerate(classes):
        waiting.append(asyncio.create_task(held.hold(f"{one} {number}", one)))
    await turns()
    assert held.order == ["first", "first"]
    held.leave.set()
    assert all(await asyncio.gather(*first, *waiting))
    assert held.order[2:] == ["high 2", "normal 1", "normal 3", "batch 0"]
    assert held.most == 2
    await all_free(slots, 2)


async def test_a_cancelled_wait_keeps_no_slot() -> None:
    """Also where it is cancelled in the turn in which its slot is granted."""
    slots = CallSlots(1)
    held = Held(slots)
    holder = asyncio.create_task(held.hold("holder", "normal"))
    await turns()
    early = asyncio.create_task(held.hold("early", "normal"))
    late = asyncio.create_task(held.hold("late", "normal"))
    await turns()
    early.cancel()
    await turns()
    holder.cancel()
    await asyncio.sleep(0)  # it gives its slot to the one that waits
    late.cancel()
    await asyncio.gather(holder, early, late, return_exceptions=True)
    assert held.order == ["holder"]
    await all_free(slots, 1)


async def test_a_wait_ends_without_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_slots, "WAIT_SECONDS", 0.05)
    slots = CallSlots(1)
    held = Held(slots)
    holder = asyncio.create_task(held.hold("holder", "normal"))
    await turns()
    async with slot(slots, "high") as taken:
        assert not taken
    held.leave.set()
    assert await holder
    await all_free(slots, 1)


async def test_waits_that_have_ended_are_not_kept_behind_a_higher_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a low class were kept for as long as a higher one waited: 10,000 of them after 10,000 waits."""
    monkeypatch.setattr(call_slots, "WAIT_SECONDS", 0.05)
    slots = CallSlots(1)
    held = Held(slots)
    holder = asyncio.create_task(held.hold("holder", "normal"))
    await turns()
    late = [asyncio.create_task(held.hold(f"late {number}", "batch")) for number in range(20)]
    cancelled = [asyncio.create_task(held.hold("cancelled", "batch")) for _ in range(20)]
    await turns()
    for one in cancelled:
        one.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    while len(held.order) < 1 + len(late):
        await asyncio.sleep(0.01)
    assert not any(slots._waiting)
    held.leave.set()
    assert await asyncio.gather(holder, *late) == [True] + [False] * len(late)
    await all_free(slots, 1)


async def test_a_tenants_placements_delay_anothers_by_one_each() -> None:
    """They went by arrival: behind one key's hundreds another tenant's waited until Redis had placed them all."""
    slots = CallSlots(1)
    order: list[str] = []

    async def place(tenant: str, priority_class: PriorityClass = "normal", weight: float = 1.0) -> None:
        async with slot(slots, priority_class, tenant, weight) as taken:
            assert taken
            order.append(tenant)
            await asyncio.sleep(0)

    many = [place("greedy") for _ in range(50)]
    await asyncio.gather(
        *many, place("other"), place("other"), place("urgent", "high"), place("heavy", "normal", 2.0)
    )
    assert order[:8] == ["greedy", "urgent", "heavy", "greedy", "other", "greedy", "other", "greedy"]
    await all_free(slots, 1)
