"""Adapters come and go as Redis names them, never from outside their directory, never under a running request."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import AdapterMissingError, InvalidRequestError, ModelError
from cluster.membership.wanted_adapters import Wanted, check_path, parse
from engine.lora.adapter_files import Adapter
from engine.lora.loaded import LoadedAdapters
from worker.adapters import RETRY_SECONDS, AdapterChanges


class World:
    """A worker with two slots, of which the settings take one."""

    def __init__(self, directory: Path):
        self.wanted: dict[str, Wanted] = {}
        self.in_use: set[str] = set()
        self.published: list[tuple[tuple[str, str], ...]] = []
        self.reachable, self.now, self.reads = True, 0.0, 0
        self.adapters = LoadedAdapters(
            SimpleNamespace(adapter_slots=2, write_adapter=lambda slot, adapter: None)
        )  # type: ignore[arg-type]
        self.adapters.load(Adapter("fixed", directory, 1, {}))
        self.changes = AdapterChanges(
            (("fixed", "fixed"),),
            directory,
            self,  # type: ignore[arg-type]
            wanted=lambda: self.wanted,
            read_adapter=self.read,
            publish=self.publish,
            clock=lambda: self.now,
        )

    async def call(self, function: Any) -> Any:
        return function(self)

    def unload_adapter(self, digest: str) -> None:
        self.adapters.unload(digest, digest in self.in_use)

    def read(self, directory: Path) -> Adapter:
        self.reads += 1
        if not directory.is_dir():
            raise ModelError("is missing")
        return Adapter((directory / "digest").read_text(), directory, 1, {})

    def publish(self, pairs: tuple[tuple[str, str], ...]) -> bool:
        if self.reachable:
            self.published.append(pairs)
        return self.reachable

    @property
    def engine_has(self) -> set[str]:
        return set(self.adapters.slots)


@pytest.fixture
def world(tmp_path) -> World:
    for name in ("a", "b"):
        (tmp_path / "dir" / name).mkdir(parents=True)
        (tmp_path / "dir" / name / "digest").write_text(name)
    return World(tmp_path / "dir")


async def test_a_wanted_adapter_is_loaded_then_published(world):
    world.wanted = {"x": Wanted("a", "1")}
    world.reachable = False
    await world.changes.follow()
    assert world.engine_has == {"fixed", "a"}
    world.reachable = True
    await world.changes.follow()
    await world.changes.follow()
    assert world.published == [(("fixed", "fixed"), ("x", "a"))]
    assert world.reads == 1


async def test_unloading_waits_for_running_requests_and_refuses_new_ones(world):
    world.wanted = {"x": Wanted("a", "1")}
    await world.changes.follow()
    world.wanted, world.in_use = {}, {"a"}
    await world.changes.follow()
    assert world.published[-1] == (("fixed", "fixed"),)
    assert world.engine_has == {"fixed", "a"}
    with pytest.raises(AdapterMissingError):
        world.adapters.check("a")
    world.in_use = set()
    await world.changes.follow()
    assert world.engine_has == {"fixed"}


async def test_wanted_again_before_its_last_request_ended(world):
    world.wanted = {"x": Wanted("a", "1")}
    await world.changes.follow()
    world.wanted, world.in_use = {}, {"a"}
    await world.changes.follow()
    world.wanted = {"x": Wanted("a", "2")}
    await world.changes.follow()
    world.adapters.check("a")
    world.in_use = set()
    await world.changes.follow()
    assert world.engine_has == {"fixed", "a"}


async def test_loaded_again_with_other_weights_it_has_another_digest(world):
    world.wanted = {"x": Wanted("a", "1")}
    await world.changes.follow()
    world.wanted = {}
    await world.changes.follow()
    (world.changes._directory / "a" / "digest").write_text("changed")
    world.wanted = {"x": Wanted("a", "2")}
    await world.changes.follow()
    assert world.published[-1] == (("fixed", "fixed"), ("x", "changed"))


async def test_what_cannot_be_loaded_is_said_and_tried_again_later(world, tmp_path):
    (tmp_path / "dir" / "out").symlink_to(tmp_path)
    world.wanted = {
        "full": Wanted("b", "1"),
        "gone": Wanted("c", "1"),
        "out": Wanted("out", "1"),
        "x": Wanted("a", "1"),
    }
    await world.changes.follow()
    await world.changes.follow()
    assert world.reads == 3  # one each, and none outside the directory
    refused = world.changes.refused_text
    assert refused is not None
    assert all(
        part in refused for part in ("gone: is missing", "out: out is not below lora_dir", "max_loras")
    )
    assert world.engine_has == {"fixed", "b"}
    (tmp_path / "dir" / "c").mkdir()
    (tmp_path / "dir" / "c" / "digest").write_text("c")
    del world.wanted["full"], world.wanted["x"], world.wanted["out"]
    await world.changes.follow()
    world.now += RETRY_SECONDS
    await world.changes.follow()
    assert world.engine_has == {"fixed", "c"}
    assert world.changes.refused_text is None


async def test_one_that_fails_in_any_way_leaves_the_others(world, tmp_path):
    (tmp_path / "dir" / "loop").symlink_to(tmp_path / "dir" / "loop")
    world.wanted = {"bad": Wanted("loop", "1"), "x": Wanted("a", "1")}
    await world.changes.follow()
    assert world.published[-1] == (("fixed", "fixed"), ("x", "a"))
    assert "bad" in world.changes.refused_text


async def test_a_name_that_means_another_one_gives_up_the_old_one(world):
    world.wanted = {"x": Wanted("a", "1")}
    await world.changes.follow()
    world.wanted = {"x": Wanted("missing", "2")}
    await world.changes.follow()
    assert world.published[-1] == (("fixed", "fixed"),)
    assert world.engine_has == {"fixed"}


async def test_a_registration_has_no_more_names_than_routers_read(world, monkeypatch):
    monkeypatch.setattr("worker.adapters.MAX_ADAPTERS", 3)
    world.wanted = {f"x{i}": Wanted("a", "1") for i in range(3)}
    await world.changes.follow()
    assert [name for name, _ in world.published[-1]] == ["fixed", "x0", "x1"]
    assert list(world.changes.refusals) == ["x2"]


async def test_after_a_registration_that_failed_the_former_one_is_made_again(world):
    world.wanted, world.reachable = {"x": Wanted("a", "1")}, False
    await world.changes.follow()
    world.wanted, world.reachable = {}, True
    await world.changes.follow()
    assert world.published == [(("fixed", "fixed"),)]


async def test_settings_go_before_redis(world):
    world.wanted = {"fixed": Wanted("a", "1")}
    await world.changes.follow()
    assert (world.reads, world.published) == (0, [])


@pytest.mark.parametrize("path", ["", "/", "/etc", "..", "a/../../b", "a\n", "x" * 513])
def test_paths_that_lead_elsewhere_are_refused(path):
    with pytest.raises(InvalidRequestError):
        check_path(path)


def test_entries_that_are_not_understood_are_left_out():
    good = Wanted.new("a/b")
    entries = {
        b"x": good.encode().encode(),
        b"bad name": good.encode().encode(),
        b"y": b"{",
        b"z": b'["../a", "t"]',
    }
    assert parse({**entries, b"w": b'["a", 1]', b"v": b"[" * 100_000}) == {"x": good}
