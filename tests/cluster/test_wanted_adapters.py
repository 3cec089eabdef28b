"""Entries of wanted adapters in a real Redis."""

from __future__ import annotations

import asyncio

import pytest

from cluster.config.adapters import MAX_ADAPTERS
from cluster.errors import InvalidRequestError
from cluster.membership import keys
from cluster.membership.wanted_adapters import Wanted, WantedReader, WantedWriter


async def test_an_entry_is_removed_and_no_other_that_came_in_its_place(redis_url, namespace):
    """What a worker has refused may have been unloaded and loaded again by another router meanwhile."""
    writer, reader = WantedWriter(redis_url, namespace), WantedReader(redis_url, namespace)
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


async def test_routers_that_add_at_once_stay_within_the_limit(redis_url, namespace):
    writers = [WantedWriter(redis_url, namespace) for _ in range(4)]
    key = keys.adapters(namespace)
    await writers[0]._client.hset(key, mapping={f"n{index}": "[]" for index in range(MAX_ADAPTERS - 1)})
    adding = (writer.add(f"new{index}", "a") for index, writer in enumerate(writers))
    refused = [
        one
        for one in await asyncio.gather(*adding, return_exceptions=True)
        if isinstance(one, InvalidRequestError)
    ]
    assert [one.limit for one in refused] == 3 * [str(MAX_ADAPTERS)]
    assert await writers[0]._client.hlen(key) == MAX_ADAPTERS
    with pytest.raises(InvalidRequestError, match="'n0' is wanted already"):
        await writers[0].add("n0", "a")
    for writer in writers:
        await writer.close()
