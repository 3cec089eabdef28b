"""Entries of wanted adapters in a real Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest
import redis

from cluster.config.adapters import MAX_ADAPTERS
from cluster.errors import InvalidRequestError
from cluster.membership import keys
from cluster.membership.known_adapters import MAX_REMOVED, WantedAdapters, WantedReader
from cluster.membership.wanted_adapters import Wanted
from cluster.redis.connect import connect


async def test_an_entry_is_removed_and_no_other_that_came_in_its_place(redis_url, namespace):
    """What a worker has refused may have been unloaded and loaded again by another router meanwhile."""
    writer, reader = WantedAdapters(redis_url, namespace), WantedReader(redis_url, namespace)
    first = await writer.add("x", "a", ("m",))
    with pytest.raises(InvalidRequestError, match="wanted already"):
        await writer.add("x", "b")
    assert await writer.find("x") == first and await writer.remove("x", first)
    second = await writer.add("x", "b")
    assert not await writer.remove("x", first)
    assert reader.read() == {"x": second} and second != Wanted("b", first.tag)
    assert await writer.remove("x", second) and not await writer.remove("x", second)
    await writer._client.hset(keys.adapters(namespace), "x", "[")
    assert await writer.find("x") is None
    assert await writer.remove("x", None) and not await writer.remove("x", None)
    reader.close()
    await writer.close()


async def test_a_name_of_no_adapter_removes_no_number_of_another(redis_url, namespace):
    """Without its number an adapter is not given back to a Redis that was emptied."""
    writer = WantedAdapters(redis_url, namespace)
    entry = await writer.add("x", "a")
    before = await writer._client.hgetall(keys.adapters(namespace))
    assert await writer.find("~x") is None and not await writer.remove("~x", None)
    assert await writer._client.hgetall(keys.adapters(namespace)) == before
    await writer._client.delete(keys.adapters(namespace))
    assert await writer.find("x") == entry
    await writer.close()


async def test_routers_that_add_at_once_stay_within_the_limit(redis_url, namespace):
    writers = [WantedAdapters(redis_url, namespace) for _ in range(4)]
    key = keys.adapters(namespace)
    await writers[0]._client.hset(key, mapping={f"n{index}": "[]" for index in range(MAX_ADAPTERS - 1)})
    adding = (writer.add(f"new{index}", "a") for index, writer in enumerate(writers))
    refused = [
        one
        for one in await asyncio.gather(*adding, return_exceptions=True)
        if isinstance(one, InvalidRequestError)
    ]
    assert [one.limit for one in refused] == 3 * [str(MAX_ADAPTERS)]
    names = await writers[0]._client.hkeys(key)
    assert len([name for name in names if not name.startswith(b"~")]) == MAX_ADAPTERS
    with pytest.raises(InvalidRequestError, match="'n0' is wanted already"):
        await writers[0].add("n0", "a")
    for writer in writers:
        await writer.close()


class Deployment:
    """A router and two workers, whose Redis may lose what it has."""

    def __init__(self, redis_url: str, namespace: str):
        self.key = keys.adapters(namespace)
        self.router, self.redis = WantedAdapters(redis_url, namespace), connect(redis_url)
        self.one, self.two = (WantedReader(redis_url, namespace) for _ in range(2))

    def read(self) -> dict[str, Wanted]:
        """What both workers want, after a reading of each."""
        first = dict(self.one.read())
        assert dict(self.two.read()) == first
        return first

    def empty(self) -> None:
        self.redis.delete(self.key)

    def entries(self) -> set[str]:
        found: Any = self.redis.hkeys(self.key)
        return {name.decode() for name in found if not name.startswith(b"~")}


@pytest.fixture
async def deployment(redis_url: str, namespace: str) -> AsyncIterator[Deployment]:
    made = Deployment(redis_url, namespace)
    yield made
    await made.router.close()
    for one in (made.one, made.two, made.redis):
        one.close()


async def test_an_emptied_redis_gets_back_what_workers_have_read(deployment):
    """At their next reading, which misses nothing; also with what was removed, once."""
    x, y = await deployment.router.add("x", "a", ("m",)), await deployment.router.add("y", "b")
    await deployment.router.remove("y", y)
    assert deployment.read() == {"x": x}
    before = deployment.redis.hgetall(deployment.key)
    deployment.empty()
    assert deployment.read() == {"x": x} and deployment.redis.hgetall(deployment.key) == before
    assert await deployment.router.find("x") == x and await deployment.router.remove("x", x)
    assert deployment.read() == {} and deployment.entries() == set()
    assert await deployment.router.find("y") is None


async def test_a_router_gives_back_what_it_has_read(deployment):
    """Its workers may restart before they have read the emptied Redis."""
    x = await deployment.router.add("x", "a")
    deployment.empty()
    with pytest.raises(InvalidRequestError, match="wanted already"):
        await deployment.router.add("x", "b")
    assert deployment.read() == {"x": x}
    deployment.empty()
    assert await deployment.router.remove("x", await deployment.router.find("x"))
    assert deployment.read() == {}


@pytest.mark.parametrize("reloaded", [False, True])
async def test_a_worker_that_missed_a_removal_does_not_undo_it(deployment, reloaded):
    """It was cut off, and Redis was emptied meanwhile. Until another one has read its entry, others do not want it."""
    x = await deployment.router.add("x", "a")
    assert deployment.read() == {"x": x}
    await deployment.router.remove("x", x)
    wanted = {"x": await deployment.router.add("x", "b")} if reloaded else {}
    assert deployment.two.read() == wanted
    deployment.empty()
    assert deployment.one.read() == {"x": x}  # nothing says otherwise yet
    assert deployment.two.read() == wanted
    assert deployment.one.read() == wanted
    assert deployment.entries() == set(wanted)
    assert await deployment.router.find("x") == wanted.get("x")


async def test_a_new_entry_in_an_emptied_redis_stands_against_older_ones(deployment, redis_url, namespace):
    """Of a router that has read nothing before."""
    await deployment.router.add("x", "a")
    deployment.read()
    deployment.empty()
    fresh = WantedAdapters(redis_url, namespace)
    second = await fresh.add("x", "b")
    await fresh.close()
    assert deployment.read() == {"x": second}
    await deployment.router.refresh()
    assert deployment.read() == {"x": second} and deployment.router.wanted == {"x": second}


async def test_a_redis_that_was_rolled_back_gets_the_later_changes(deployment):
    x = await deployment.router.add("x", "a")
    before = deployment.redis.hgetall(deployment.key)
    await deployment.router.remove("x", x)
    y = await deployment.router.add("y", "b")
    deployment.read()
    deployment.empty()
    deployment.redis.hset(deployment.key, mapping=before)
    assert deployment.read() == {"y": y} and deployment.entries() == {"y"}


async def test_what_routers_of_earlier_versions_write_counts(deployment):
    """They number nothing, and leave no mark of what they remove."""
    x = await deployment.router.add("x", "a")
    old = Wanted.new("b")
    deployment.redis.hset(deployment.key, "y", old.encode())
    assert deployment.read() == {"x": x, "y": old}
    deployment.redis.hdel(deployment.key, "x", "y")
    assert deployment.read() == {}
    deployment.redis.hset(deployment.key, "x", old.encode())
    assert deployment.read() == {"x": old}
    deployment.empty()
    deployment.redis.hset(deployment.key, "x", old.encode())
    assert deployment.read() == {"x": old}


async def test_removed_names_are_forgotten_in_their_order(deployment):
    """No worker keeps more of them than Redis, and none writes back what Redis has dropped."""
    for first in (0, 100):  # what the worker has read is more than Redis keeps
        marks = {f"~n{index}": index + 1 for index in range(first, first + MAX_REMOVED)}
        deployment.empty()
        deployment.redis.hset(deployment.key, mapping=marks)
        deployment.one.read()
    await deployment.router.remove("m", await deployment.router.add("m", "a"))
    numbered = deployment.redis.hkeys(deployment.key)
    assert len(numbered) == MAX_REMOVED and {b"~m", b"~n355"} < {*numbered}
    deployment.read()
    assert set(deployment.redis.hkeys(deployment.key)) == {*numbered}
    assert len(deployment.one._known._changes) == MAX_REMOVED


async def test_nonsense_beside_the_entries_is_left_out(deployment):
    x = await deployment.router.add("x", "a")
    for name, value in (("~", "1"), ("~y", "one"), ("~z", "9" * 400), ("~ä", "1"), ("~v", "-1"), ("w", "[")):
        deployment.redis.hset(deployment.key, name, value)
    assert deployment.read() == {"x": x}
    deployment.redis.hset(deployment.key, mapping={"x": json.dumps(["../a", "t"])})  # not understood
    assert deployment.read() == {}


async def test_a_worker_that_may_only_read_keeps_what_it_has_read(deployment, monkeypatch):
    """As a Redis user of an earlier version, or in a Redis that is full."""
    x = await deployment.router.add("x", "a")
    deployment.read()
    deployment.empty()
    refused = redis.exceptions.NoPermissionError("NOPERM")
    with monkeypatch.context() as patch:
        patch.setattr(deployment.one._client, "eval", Mock(side_effect=refused))
        assert deployment.one.read() == {"x": x} and deployment.entries() == set()
    assert deployment.one.read() == {"x": x} and deployment.entries() == {"x"}
