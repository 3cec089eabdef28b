"""After any sequence of loads, failures and cancels no lane keeps what was read, and no slot an adapter without a name."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import redis

from cluster.errors import AdapterSlotsError, ModelError
from cluster.membership.wanted_adapters import Wanted
from tests.worker.adapter_world import World, made
from worker.adapters import RETRY_SECONDS

NAMES, DIRECTORIES = ("x", "y", "z"), ("a", "b", "missing", "slow")


class Failing(World):
    """Its engine's thread answers later. Redis and what loads an adapter fail as often as `odds` say."""

    def __init__(self, directory: Path, seed: int = 0):
        super().__init__(directory)
        self.odds, self.rng, self.published = 0.0, random.Random(seed), [(("fixed", "fixed"),)]
        for of, name in ((self.runner, "begin"), (self.runner, "digest"), (self.changes, "_wanted")):
            setattr(of, name, self.failing(getattr(of, name)))

    def failing(self, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.fail()
            return function(*arguments)

        return call

    def fail(self) -> None:
        if self.rng.random() < self.odds:
            raise self.rng.choice([RuntimeError, ModelError, redis.ConnectionError])("it fails")

    async def call(self, function: Any) -> Any:
        result: list[Any] = []

        def run() -> None:  # as on the engine's thread: also if the caller is cancelled
            try:
                result.append(function(self))
            except Exception as error:
                result.append(error)

        asyncio.get_running_loop().call_soon(run)
        for _ in range(self.rng.randrange(2, 5)):  # the answer comes later than the engine has done it
            await asyncio.sleep(0)
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]

    def write_adapter(self, digest: str, held: Collection[str], lane: int) -> None:
        self.fail()
        super().write_adapter(digest, held, lane)
        self.fail()

    def publish(self, pairs: tuple[tuple[str, str], ...]) -> bool:
        self.fail()
        self.reachable = self.rng.random() >= self.odds
        return super().publish(pairs)


@pytest.fixture
def directory(tmp_path):
    made(tmp_path)
    return tmp_path / "dir"


async def drive(world: Failing, rng: random.Random) -> None:
    """Adapters are wanted and given up while `follow` runs, fails, is cancelled or stopped, and files are slow."""
    for _ in range(rng.randrange(1, 6)):
        world.odds, world.now = rng.choice([0.0, 0.1, 0.5]), world.now + RETRY_SECONDS + 1
        world.runner.slow["slow"] = rng.randrange(8)
        following = asyncio.create_task(world.changes.follow())
        for _ in range(rng.randrange(4)):
            name = rng.choice(NAMES)
            world.wanted = {one: what for one, what in world.wanted.items() if one != name}
            if rng.random() < 0.7:
                world.wanted[name] = Wanted(rng.choice(DIRECTORIES), str(rng.random()))
            world.in_use = {rng.choice(DIRECTORIES)}
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
        if rng.random() < 0.5:
            following.cancel()
        await asyncio.wait([following])


async def settled(world: Failing) -> None:
    """Nothing is wanted any more, and nothing fails."""
    world.odds, world.in_use, world.wanted = 0.0, set(), {}
    world.now += RETRY_SECONDS + 1
    await world.changes.follow()
    assert not world.changes._loading and not world.runner.reading, "a lane keeps what was read"
    assert world.changes.pairs == world.published[-1] == (("fixed", "fixed"),)
    assert world.engine_has - {"fixed"} <= set(world.adapters._released), "a slot of no name"
    assert not (world.changes.refusals or world.changes._retry_at or world.changes._without_slot)


@pytest.mark.parametrize("seeds", [range(at, at + 50) for at in range(0, 100, 50)])
async def test_lanes_and_slots_return_to_zero(directory, monkeypatch, seeds):
    monkeypatch.setattr("worker.adapters.ASK_SECONDS", 0)
    monkeypatch.setattr("asyncio.to_thread", inline)
    for seed in seeds:
        rng = random.Random(seed)
        world = Failing(directory, seed)
        world.runner.count = 3
        await drive(world, rng)
        await settled(world)
        world.wanted = {"x": Wanted("a", "-1"), "y": Wanted("b", "-2")}
        await world.changes.follow()
        assert dict(world.changes.pairs) == {"fixed": "fixed", "x": "a", "y": "b"}, "all slots are there"


async def inline(function: Any, *arguments: Any) -> Any:
    """A thread's work that a test can repeat."""
    await asyncio.sleep(0)
    result = function(*arguments)
    await asyncio.sleep(0)
    return result


async def test_an_error_of_the_engine_frees_its_lane(directory):
    """Of any kind: what was read took memory until another adapter was read in that lane."""
    world = Failing(directory)
    world.wanted = {"x": Wanted("a", "1")}

    def digest(lane: int = 0) -> str | None:
        raise RuntimeError("of a collective operation")

    world.runner.digest = digest  # type: ignore[method-assign]
    await world.changes.follow()
    assert "collective" in world.changes.refusals["x"].message and not world.runner.reading


async def test_an_adapter_that_was_written_as_its_loading_was_cancelled_has_no_slot_for_ever(directory):
    world = Failing(directory)
    world.wanted = {"x": Wanted("a", "1")}
    following = asyncio.create_task(world.changes.follow())
    while "a" not in world.engine_has:
        await asyncio.sleep(0)
    assert not following.done()
    following.cancel()
    await asyncio.wait([following])
    world.wanted = {"y": Wanted("b", "1")}
    await world.changes.follow()
    assert world.engine_has == {"fixed", "b"}
    with pytest.raises(AdapterSlotsError):
        world.adapters.write("c", ("b",))
