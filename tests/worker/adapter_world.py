"""A worker's adapters on a stub engine and a clock of the test."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from cluster.errors import ModelError
from cluster.membership.wanted_adapters import Wanted
from engine.lora.loaded import LoadedAdapters
from engine.lora.reading import inside
from worker.adapters import AdapterChanges


class Runner:
    """Reads at once what the file `digest` of a directory says."""

    count = 2

    def __init__(self) -> None:
        self.reads = 0
        self.reading: dict[int, Path] = {}  # by lane
        self.lanes: list[int] = []  # of all readings that have begun
        self.slow: dict[str, int] = {}  # by directory: questions that are answered with "not yet"

    def begin(self, directory: Path, below: Path | None = None, lane: int = 0) -> None:
        assert below is not None, "calls name directories"
        self.reading[lane] = inside(directory, below)
        self.lanes.append(lane)
        self.reads += 1

    def digest(self, lane: int = 0) -> str | None:
        directory = self.reading[lane]
        if self.slow.get(directory.name):
            self.slow[directory.name] -= 1
            return None
        if not directory.is_dir():
            raise ModelError("is missing")
        return (directory / "digest").read_text()

    def write(self, slot: int, lane: int = 0) -> None:
        del self.reading[lane]

    def drop(self, lane: int = 0) -> None:
        self.reading.pop(lane, None)


class World:
    """A worker with two slots, of which the settings take one."""

    def __init__(self, directory: Path):
        self.wanted: dict[str, Wanted] = {}
        self.in_use: set[str] = set()
        self.held: set[str] = set()
        self.published: list[tuple[tuple[str, str], ...]] = []
        self.reachable, self.now = True, 0.0
        self.runner = Runner()
        self.adapters = LoadedAdapters(self.runner)
        self.adapters.slots["fixed"] = 1
        self.changes = AdapterChanges(
            (("fixed", "fixed"),),
            directory,
            self,  # type: ignore[arg-type]
            served_model="m",
            wanted=lambda: self.wanted,
            held=lambda: self.held,
            publish=self.publish,
            clock=lambda: self.now,
        )

    async def call(self, function: Any) -> Any:
        return function(self)

    def adapter_fits(self, digest: str, held: Collection[str]) -> bool:
        return self.adapters.fits(digest, self.in_use.union(held))

    def write_adapter(self, digest: str, held: Collection[str], lane: int) -> None:
        self.adapters.write(digest, self.in_use.union(held), lane)

    def publish(self, pairs: tuple[tuple[str, str], ...]) -> bool:
        if self.reachable:
            self.published.append(pairs)
        return self.reachable

    @property
    def reads(self) -> int:
        return self.runner.reads

    @property
    def engine_has(self) -> set[str]:
        return set(self.adapters.slots)


def made(directory: Path) -> World:
    """With the adapters a and b in its directory."""
    for name in ("a", "b"):
        (directory / "dir" / name).mkdir(parents=True)
        (directory / "dir" / name / "digest").write_text(name)
    return World(directory / "dir")
