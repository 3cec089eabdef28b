"""Adapters come and go as Redis names them, never from outside their directory, never under a running request."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from cluster.errors import AdapterMissingError, InvalidRequestError
from cluster.membership import keys
from cluster.membership.adapter_refusals import decode
from cluster.membership.known_adapters import WantedAdapters, WantedReader
from cluster.membership.wanted_adapters import Wanted, check_path, parse
from tests.worker.adapter_world import World, made
from worker.adapters import RETRY_SECONDS


@pytest.fixture
def world(tmp_path) -> World:
    return made(tmp_path)


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


async def test_an_unloaded_adapter_stays_for_requests_that_began_before(world):
    world.wanted = {"x": Wanted("a", "1")}
    await world.changes.follow()
    world.wanted = {}
    await world.changes.follow()
    assert world.published[-1] == (("fixed", "fixed"),)
    world.adapters.check("a")  # routers place no new ones here
    world.wanted = {"y": Wanted("b", "1")}
    await world.changes.follow()
    assert world.engine_has == {"fixed", "b"}
    with pytest.raises(AdapterMissingError):
        world.adapters.check("a")


async def test_a_slot_stays_until_the_removal_is_registered(world):
    """Routers still place requests by the name."""
    world.wanted = {"x": Wanted("a", "1")}
    await world.changes.follow()
    world.wanted, world.reachable = {}, False
    for _ in range(2):
        await world.changes.follow()
        world.adapters.check("a")
    world.wanted, world.reachable = {"y": Wanted("b", "1")}, True
    await world.changes.follow()
    assert world.engine_has == {"fixed", "b"} and (("fixed", "fixed"),) in world.published


@pytest.mark.parametrize("where", ["in_use", "held"])
async def test_a_replacement_goes_as_soon_as_no_request_has_the_old_one(where, world):
    """In the engine, or elsewhere in the worker; without being read again, and without the time between two tries."""
    world.wanted = {"x": Wanted("a", "1")}
    await world.changes.follow()
    world.wanted = {"x": Wanted("b", "2")}
    setattr(world, where, {"a"})
    for _ in range(3):
        await world.changes.follow()
        assert world.engine_has == {"fixed", "a"} and world.published[-1] == (("fixed", "fixed"),)
        assert "requests still use" in world.changes.refused_text and not world.changes.refusals["x"].final
    assert world.reads == 2
    setattr(world, where, set())
    await world.changes.follow()
    assert world.published[-1] == (("fixed", "fixed"), ("x", "b"))
    assert world.engine_has == {"fixed", "b"} and world.changes.refused_text is None


async def test_a_replacement_of_an_idle_one_goes_at_once_with_all_slots_taken(world):
    world.wanted = {"x": Wanted("a", "1")}
    await world.changes.follow()
    world.wanted = {"x": Wanted("b", "2")}
    await world.changes.follow()
    alone = ("fixed", "fixed")
    # Not under its name meanwhile: a router would take the old one for the new.
    assert world.published == [(alone, ("x", "a")), (alone,), (alone, ("x", "b"))]


async def test_files_that_do_not_answer_are_given_up(world, monkeypatch):
    monkeypatch.setattr("worker.adapters.ASK_SECONDS", 0)
    monkeypatch.setattr("worker.adapters.READ_SECONDS", -1.0)
    world.runner.slow, world.wanted = {"a": 1000}, {"x": Wanted("a", "1")}
    await world.changes.follow()
    assert "not read within" in world.changes.refused_text
    assert not world.runner.reading and world.engine_has == {"fixed"}


@pytest.mark.parametrize("then", [{}, {"x": Wanted("b", "2")}])
async def test_what_was_unloaded_while_it_was_read_is_not_loaded(then, world, monkeypatch):
    """Neither for a moment, nor in the place of its successor; and others are given up meanwhile."""
    monkeypatch.setattr("worker.adapters.ASK_SECONDS", 0)
    world.in_use = {"fixed"}
    world.wanted = {"other": Wanted("b", "1")}
    await world.changes.follow()
    asked = world.runner.digest
    world.wanted = {**world.wanted, "x": Wanted("a", "1")}

    def unloaded(lane: int) -> str | None:
        world.wanted = then
        found: str | None = asked(lane)
        return found

    world.runner.digest = unloaded
    await world.changes.follow()
    alone = ("fixed", "fixed")
    assert world.published[:2] == [(alone, ("other", "b")), (alone,)]
    assert (alone, ("x", "a")) not in world.published and "a" not in world.engine_has
    assert not world.runner.reading and not world.changes.refusals
    await world.changes.follow()
    assert world.changes.pairs == (alone, *((name, one.path) for name, one in then.items()))


async def test_slow_files_do_not_keep_others_from_being_unloaded(world, monkeypatch):
    monkeypatch.setattr("worker.adapters.ASK_SECONDS", 0)
    monkeypatch.setattr("worker.adapters.POLL_SECONDS", 0.001)
    world.wanted = {"x": Wanted("a", "1")}
    await world.changes.follow()
    world.wanted = {"y": Wanted("b", "1"), "x": Wanted("a", "1")}
    asked, seen = world.runner.digest, []

    def slowly(lane: int) -> str | None:
        world.wanted.pop("x", None)
        seen.append(world.published[-1])
        found: str | None = asked(lane) if seen[-1] == (("fixed", "fixed"),) else None
        return found

    world.runner.digest = slowly
    await world.changes.follow()
    assert seen[-1] == (("fixed", "fixed"),)
    assert world.published[-1] == (("fixed", "fixed"), ("y", "b"))


async def test_adapters_of_other_models_are_left_to_their_workers(world):
    world.wanted = {"x": Wanted("a", "1", ("other", "")), "y": Wanted("b", "1", ("m",))}
    await world.changes.follow()
    assert world.published[-1] == (("fixed", "fixed"), ("y", "b"))
    assert world.reads == 1 and not world.changes.refusals
    entries = {name.encode(): one.encode().encode() for name, one in world.wanted.items()}
    assert parse(entries) == world.wanted


async def test_wanted_again_before_its_last_request_ended(world):
    world.wanted = {"x": Wanted("a", "1")}
    await world.changes.follow()
    world.wanted, world.in_use = {}, {"a"}
    await world.changes.follow()
    world.wanted = {"x": Wanted("a", "2")}
    await world.changes.follow()
    world.in_use = set()
    assert world.published[-1] == (("fixed", "fixed"), ("x", "a"))
    assert not world.adapters.fits("b", ())  # its slot is no longer to be had


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
    assert world.reads == 3  # one each, also of that without a slot; none outside the directory
    refused = world.changes.refused_text
    assert refused is not None
    assert decode(refused) == world.changes.refusals
    said = {name: one.message for name, one in world.changes.refusals.items()}
    assert said["gone"] == "is missing" and "/dir/out is not below" in said["out"]
    assert "max_loras" in said["x"] and all(one.final for one in world.changes.refusals.values())
    assert world.engine_has == {"fixed", "b"}
    (tmp_path / "dir" / "c").mkdir()
    (tmp_path / "dir" / "c" / "digest").write_text("c")
    del world.wanted["full"], world.wanted["x"], world.wanted["out"]
    await world.changes.follow()
    assert world.engine_has == {"fixed", "b"}
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
    assert world.adapters.fits("b", ())


@pytest.mark.parametrize("then", ["cancelled", "failed"])
async def test_a_removal_is_announced_whatever_becomes_of_the_slot(then, world, monkeypatch):
    """The slot is given up at the next look."""
    world.wanted = {"x": Wanted("a", "1")}
    await world.changes.follow()
    world.wanted, asked, call = {}, asyncio.Event(), world.call

    async def between_steps(function: Any) -> Any:
        asked.set()
        if then == "failed":
            raise RuntimeError("of a collective operation")
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(world, "call", between_steps)
        following = asyncio.create_task(world.changes.follow())
        await asked.wait()
        following.cancel()
        await asyncio.wait([following])
    assert world.call == call and world.published[-1] == (("fixed", "fixed"),)
    assert not world.adapters.fits("b", ())
    await world.changes.follow()
    assert world.adapters.fits("b", ()) and len(world.published) == 2


async def test_a_registration_goes_on_though_its_look_is_cancelled(world, monkeypatch):
    """What changed since it began is registered after it, never beside it; what began is over when `follow` is."""
    world.wanted = {"x": Wanted("a", "1")}
    await world.changes.follow()
    began, go, publish = threading.Event(), threading.Event(), world.publish

    def slowly(pairs: Any) -> bool:
        began.set()
        assert go.wait(10.0)  # far more than this takes
        return publish(pairs)

    monkeypatch.setattr(world.changes, "_publish", slowly)
    world.wanted = {}
    following = asyncio.create_task(world.changes.follow())
    await asyncio.to_thread(began.wait, 10.0)
    following.cancel()
    await asyncio.sleep(0)
    assert not following.done()
    go.set()
    await asyncio.wait([following])
    assert following.cancelled() and world.published[-1] == (("fixed", "fixed"),)
    await world.changes.follow()
    assert len(world.published) == 2 and world.adapters.fits("b", ())


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


async def test_adapters_stay_in_an_emptied_redis(world, redis_url, namespace, monkeypatch):
    """None is unloaded meanwhile; a call unloads it afterwards as before."""
    entries, reader = WantedAdapters(redis_url, namespace), WantedReader(redis_url, namespace)
    monkeypatch.setattr(world.changes, "_wanted", reader.read)
    await entries.add("x", "a")
    await world.changes.follow()
    assert world.published == [(("fixed", "fixed"), ("x", "a"))]
    await entries._client.delete(keys.adapters(namespace))
    for _ in range(2):
        await world.changes.follow()
    assert len(world.published) == 1
    assert await entries._client.hexists(keys.adapters(namespace), "x")
    await entries.remove("x", await entries.find("x"))
    await world.changes.follow()
    assert world.published[1:] == [(("fixed", "fixed"),)]
    reader.close()
    await entries.close()


async def test_a_worker_waits_for_its_first_adapters_and_not_for_ever(world, monkeypatch):
    """Files that hang, or a Redis that does not answer, keep no worker from serving its model."""
    world.wanted = {"x": Wanted("a", "1")}
    world.runner.slow["a"] = 2
    following = asyncio.create_task(world.changes.follow())
    await world.changes.wait_followed()
    assert world.published == [(("fixed", "fixed"), ("x", "a"))]
    await following
    monkeypatch.setattr("worker.adapters.START_SECONDS", 0.05)
    hanging = World(world.changes._directory)
    hanging.wanted, hanging.runner.slow["b"] = {"y": Wanted("b", "1")}, 10**9
    following = asyncio.create_task(hanging.changes.follow())
    await hanging.changes.wait_followed()
    assert not following.done() and not hanging.published
    hanging.changes.stop()
    await following


async def test_what_has_waited_for_a_slot_is_read_again_once_its_files_are_gone(world, tmp_path):
    """It was refused for its files with the words of a slot."""
    world.wanted = {"x": Wanted("a", "1"), "y": Wanted("b", "1")}
    await world.changes.follow()
    assert "max_loras" in world.changes.refusals["y"].message
    (tmp_path / "dir" / "b" / "digest").rename(tmp_path / "digest")
    (tmp_path / "dir" / "b").rmdir()
    del world.wanted["x"]
    await world.changes.follow()
    world.wanted["x"] = Wanted("a", "2")
    await world.changes.follow()
    assert (world.changes.refusals["y"].message, world.engine_has) == ("is missing", {"fixed", "a"})
    world.now += RETRY_SECONDS
    reads = world.reads
    await world.changes.follow()
    refused = world.changes.refusals["y"]
    assert (refused.message, refused.field, world.reads) == ("is missing", "", reads + 1)
