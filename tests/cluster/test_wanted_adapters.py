"""Entries of wanted adapters in a real Redis."""

from __future__ import annotations

import pytest

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
