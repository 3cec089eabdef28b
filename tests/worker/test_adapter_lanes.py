"""Adapters are read side by side, so many at a time: files that do not answer delay their own adapter only."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import UnavailableError
from cluster.membership.wanted_adapters import Wanted
from engine.lora.loaded import READ_SECONDS
from engine.lora.message import LANES
from tests.harness.waiting import until
from tests.worker.adapter_world import World, made
from worker.adapters import RETRY_SECONDS


@pytest.fixture
def world(tmp_path) -> World:
    return made(tmp_path)


async def test_slow_files_delay_their_own_adapter_only(world, monkeypatch):
    """Neither another one of the same look, nor one that comes meanwhile, nor one that waits for a slot."""
    monkeypatch.setattr("worker.adapters.ASK_SECONDS", 0.001)
    monkeypatch.setattr("worker.adapters.POLL_SECONDS", 0.005)
    world.runner.count = 3
    world.runner.slow = {"slow": 10**9}
    world.wanted = {"slow": Wanted("slow", "1"), "x": Wanted("a", "1")}
    following = asyncio.create_task(world.changes.follow())
    alone = ("fixed", "fixed")

    async def published(*pairs: tuple[str, str]) -> None:
        await until(lambda: world.published[-1:] == [(alone, *pairs)], f"{pairs} are published")

    await published(("x", "a"))
    world.wanted["y"] = Wanted("b", "1")
    await published(("x", "a"), ("y", "b"))
    (world.changes._directory / "c").mkdir()
    (world.changes._directory / "c" / "digest").write_text("c")
    world.in_use = {"a"}
    del world.wanted["x"]
    world.wanted["z"] = Wanted("c", "1")
    await published(("y", "b"))
    await until(lambda: "z" in world.changes.refusals, "it is refused")
    world.in_use = set()
    await published(("y", "b"), ("z", "c"))
    assert not following.done()
    world.now += READ_SECONDS + 1
    await following
    assert list(world.changes.refusals) == ["slow"]
    assert "not read within" in world.changes.refusals["slow"].message


async def test_a_worker_that_stops_waits_for_no_files(world, monkeypatch):
    """It ends what repeats, which cancels nothing (cluster/periodic.py)."""
    monkeypatch.setattr("worker.adapters.POLL_SECONDS", 60.0)
    world.runner.slow, world.wanted = {"a": 10**9}, {"x": Wanted("a", "1")}
    following = asyncio.create_task(world.changes.follow())
    while not world.runner.reading:
        await asyncio.sleep(0)
    world.changes.stop()
    await asyncio.wait_for(following, 5)
    assert not world.changes._loading and len(asyncio.all_tasks()) == 1


async def test_files_that_do_not_answer_keep_to_one_lane(world, monkeypatch):
    """However often they are tried: their threads may still be there."""
    monkeypatch.setattr("worker.adapters.ASK_SECONDS", 0)
    monkeypatch.setattr("worker.adapters.READ_SECONDS", -1.0)
    world.runner.slow, world.wanted = {"a": 10**9}, {"x": Wanted("a", "1")}
    for _ in range(3):
        await world.changes.follow()
        world.now += RETRY_SECONDS
    assert world.runner.lanes == [0, 0, 0]
    world.wanted["y"] = Wanted("b", "1")
    await world.changes.follow()
    assert sorted(world.runner.lanes[3:]) == [0, 1] and "y" in dict(world.changes.pairs)


async def test_so_many_are_read_at_a_time(world, monkeypatch):
    monkeypatch.setattr("worker.adapters.ASK_SECONDS", 0)
    world.wanted = {f"x{i}": Wanted(f"s{i}", "1") for i in range(LANES + 2)}
    world.runner.slow = {f"s{i}": 20 for i in range(LANES + 2)}
    most, asked = [], world.runner.digest

    def counted(lane: int) -> str | None:
        most.append(len(world.runner.reading))
        found: str | None = asked(lane)
        return found

    world.runner.digest = counted
    for i in range(LANES + 2):
        (world.changes._directory / f"s{i}").mkdir()
        (world.changes._directory / f"s{i}" / "digest").write_text("same")
    await world.changes.follow()
    assert max(most) == LANES and len(world.changes.pairs) == LANES + 3


async def test_refusals_end_with_their_entries_although_others_are_read(world, monkeypatch):
    """Files that do not answer, tried again in turns, may keep readings going without a pause."""
    monkeypatch.setattr("worker.adapters.ASK_SECONDS", 0.001)
    monkeypatch.setattr("worker.adapters.POLL_SECONDS", 0.005)
    world.runner.slow = {"a": 10**9}
    world.wanted = {"slow": Wanted("a", "1"), "bad": Wanted("missing", "1")}
    following = asyncio.create_task(world.changes.follow())
    await until(lambda: "bad" in world.changes.refusals, "it is refused")
    del world.wanted["bad"]
    await until(lambda: not world.changes.refusals and not world.changes._retry_at, "it is forgotten")
    assert not following.done()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_the_last_refusals_are_those_tried_last(world):
    world.wanted = {"x": Wanted("missing", "1"), "y": Wanted("missing", "1")}
    await world.changes.follow()
    assert list(world.changes.refusals) == ["x", "y"]
    world.wanted = {"x": Wanted("missing", "2"), "y": Wanted("missing", "1")}
    await world.changes.follow()
    assert list(world.changes.refusals) == ["y", "x"]


@pytest.mark.parametrize("known", [True, False])
async def test_a_lane_that_stays_blocked_is_not_tried_again_before_the_others(known, world, monkeypatch):
    """Also one whose reading was cancelled, which no other adapter is noted for."""
    monkeypatch.setattr("worker.adapters.ASK_SECONDS", 0)
    asked = world.runner.digest

    def digest(lane: int) -> str | None:
        if lane == 0:
            raise UnavailableError("an earlier reading still waits")
        found: str | None = asked(lane)
        return found

    world.runner.digest = digest
    if known:
        world.changes._blocked = {lane: (f"s{lane}", Wanted("s", "1")) for lane in range(LANES)}
    world.wanted = {"x": Wanted("a", "1")}
    for _ in range(2):
        await world.changes.follow()
        world.now += RETRY_SECONDS
    assert world.runner.lanes == [0, 1] and "x" in dict(world.changes.pairs)
