"""Figures and statuses in the memory that processes share; what readiness makes of them; when a process starts again."""

from __future__ import annotations

import time

import pytest

from cluster.process.restarts import MAX_PAUSE_SECONDS, MAX_SHORT_LIVES, SHORT_LIFE_SECONDS, Restarts
from cluster.protocol.times import SUSPECT_SECONDS
from router.processes.memory import STATUS_BYTES, Figure, SharedMemory
from router.processes.readiness import why_not_ready

LONG = SHORT_LIFE_SECONDS + 1


@pytest.fixture
def memory() -> SharedMemory:
    made = SharedMemory.create(3, 4)
    for slot in made.slots():
        slot.write_status([])
        slot.beat()
    return made


def test_all_processes_are_ready(memory: SharedMemory) -> None:
    assert why_not_ready(memory) == []


def test_a_reason_of_one_process_names_it(memory: SharedMemory) -> None:
    memory.slot(1).write_status(["no decode worker is available", "another"])
    assert why_not_ready(memory) == ["process 1: no decode worker is available", "process 1: another"]


def test_a_reason_of_all_processes_is_the_routers(memory: SharedMemory) -> None:
    for slot in memory.slots():
        slot.write_status(["no decode worker is available"])
    assert why_not_ready(memory) == ["no decode worker is available"]


def test_newer_reasons_than_those_in_memory_count(memory: SharedMemory) -> None:
    assert why_not_ready(memory, {2: ["draining"]}) == ["process 2: draining"]


def test_a_process_that_has_not_served_is_being_started(memory: SharedMemory) -> None:
    memory.reclaim(0)
    assert why_not_ready(memory) == ["process 0: it is being started"]


def test_a_silent_process_is_not_ready(memory: SharedMemory) -> None:
    slot = memory.slot(2)
    slot.set(Figure.BEAT, time.monotonic_ns() - int((SUSPECT_SECONDS + 1) * 1e9))
    assert why_not_ready(memory) == ["process 2: it has been silent for 3 s"]


def test_a_status_has_bounds_and_is_read_whole(memory: SharedMemory) -> None:
    slot = memory.slot(1)
    slot.write_status(["x" * (2 * STATUS_BYTES)])
    assert slot.read_status() == ["x" * STATUS_BYTES]
    assert memory.slot(2).read_status() == [], "the next slot is as it was"
    slot.write_status(["short"])
    assert slot.read_status() == ["short"]
    slot.add(Figure.STATUS_VERSION, 1)  # killed while it wrote
    assert slot.read_status() == ["its status changes"]


def test_slots_do_not_overlap(memory: SharedMemory) -> None:
    for number, slot in enumerate(memory.slots()):
        for figure in Figure:
            slot.set(figure, 100 * number + figure)
        for cell in range(memory.tenants):
            slot.set_key(cell, 1000 * number + cell + 1)
    for number, slot in enumerate(memory.slots()):
        assert [slot.get(figure) for figure in Figure] == [100 * number + figure for figure in Figure]
        assert [slot.find(1000 * number + cell + 1) for cell in range(memory.tenants)] == [0, 1, 2, 3]


def test_pauses_grow_and_end() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_after(0.1, served=True) for _ in range(MAX_SHORT_LIVES)]
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, MAX_PAUSE_SECONDS, None]


def test_a_long_life_begins_the_count_anew() -> None:
    restarts = Restarts()
    for _ in range(MAX_SHORT_LIVES - 1):
        restarts.pause_after(0.1, served=True)
    assert restarts.pause_after(LONG, served=True) == 0.2
    assert restarts.pause_after(0.1, served=True) == 0.2
    assert restarts.pause_after(0.1, served=True) == 0.4


def test_a_life_without_service_is_short() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_after(LONG, served=False) for _ in range(MAX_SHORT_LIVES)]
    assert pauses[-1] is None
