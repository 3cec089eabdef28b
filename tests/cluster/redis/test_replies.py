"""Replies that announce more than any script of the project answers: no memory is reserved for them."""

from __future__ import annotations

import hiredis
import pytest
import redis

from cluster.redis.connect import connect, connect_async
from cluster.redis.replies import MAX_ELEMENTS, BoundedReader
from tests.harness.fake_redis import FakeRedis

MORE = object()
TOO_LARGE = [
    b"*2000000000\r\n",
    b"*%d\r\n" % (MAX_ELEMENTS + 1),
    b"*2\r\n:1\r\n%2000000\r\n",
    b"~2000000\r\n",
    b">2000000\r\n",
    b"*9999\r\n" * 200,
    b"$999999999\r\n",
]


def reader() -> BoundedReader:
    return BoundedReader(hiredis.Reader(notEnoughData=MORE), MORE)


def feed(bounded: BoundedReader, parts: list[bytes]) -> None:
    for part in parts:
        bounded.feed(part)
        assert bounded.gets() is MORE


@pytest.mark.parametrize("reply", TOO_LARGE, ids=lambda reply: repr(reply[:20]))
@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_a_reply_that_announces_too_much_is_refused(reply: bytes, size: int) -> None:
    """A header may arrive in parts."""
    with pytest.raises(redis.InvalidResponse, match="a reply "):
        feed(reader(), [reply[begin : begin + size] for begin in range(0, len(reply), size)])


@pytest.mark.parametrize("size", [1, 7, 24, 25, 1 << 20])
def test_replies_within_the_bound_are_read_one_after_another(size: int) -> None:
    """Each of them alone: what counts is one reply, not the connection's life."""
    one = b"*200000\r\n" if size == 1 << 20 else b"*2000\r\n"
    count = 200_000 if size == 1 << 20 else 2000
    bounded, got = reader(), []
    data = (one + b":1\r\n" * count) * 8
    for begin in range(0, len(data), size):
        bounded.feed(data[begin : begin + size])
        while (reply := bounded.gets()) is not MORE:
            got.append(len(reply))
    assert got == [count] * 8


def lies(command: list[str]) -> bytes:
    return b"+OK\r\n" if command[0] != "GET" else b"*2000000000\r\n"


def test_a_blocking_client_refuses_it() -> None:
    fake = FakeRedis(lies)
    with connect(f"redis://{fake.address}?protocol=2") as client, pytest.raises(redis.InvalidResponse):
        client.get("x")
    fake.close()


async def test_an_asyncio_client_refuses_it_and_goes_on() -> None:
    fake = FakeRedis(lies)
    client = connect_async(f"redis://{fake.address}?protocol=2")
    with pytest.raises(redis.InvalidResponse):
        await client.get("x")
    assert await client.set("x", "y")
    await client.aclose()
    fake.close()
