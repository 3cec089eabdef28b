"""Concurrent refreshes of a router's membership view."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis

from cluster.membership.reader import Members
from cluster.membership.registry import encode
from cluster.membership.types import WorkerInfo
from cluster.redis.connect import connect

INFO = WorkerInfo("w", 7, 3, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)


@pytest.fixture
async def members(redis_url: str, namespace: str) -> AsyncIterator[Members]:
    made = Members(redis_url, namespace)
    yield made
    await made.close()


def answer(number: int) -> list[Any]:
    info = encode(INFO).replace('"worker_id": "w"', f'"worker_id": "w{number}"')
    return [b"1000", b"4", b"w", info.encode(), b"900", b"{}", b""]


async def test_fifty_at_once_are_one_read(members: Members, redis_url: str) -> None:
    await members.refresh()
    reads, read = [], members._read

    async def counted(**arguments: Any) -> Any:
        reads.append(arguments)
        return await read(**arguments)

    members._read = counted  # type: ignore[assignment]
    with connect(redis_url) as client:
        before = client.info("clients")["connected_clients"]
        await asyncio.gather(*(members.refresh() for _ in range(50)))
        assert len(reads) == 1
        assert client.info("clients")["connected_clients"] == before, "over the connection that was there"


async def test_an_older_answer_does_not_replace_a_newer_one(members: Members) -> None:
    begun: list[asyncio.Event] = []
    members.redis_ok, members._back_since = True, -1e9  # Redis was there all the time

    async def slow(**arguments: Any) -> Any:
        number = len(begun)
        begun.append(asyncio.Event())
        if number == 0:
            await begun[0].wait()
        return answer(number)

    members._read = slow  # type: ignore[assignment]
    first = asyncio.create_task(members.refresh())
    while not begun:
        await asyncio.sleep(0)
    later = [asyncio.create_task(members.refresh()) for _ in range(5)]
    for _ in range(20):
        await asyncio.sleep(0)
    begun[0].set()
    await asyncio.gather(first, *later)
    assert [worker.worker_id for worker in members.all] == ["w1"]
    assert len(begun) == 2, "callers that asked meanwhile share the next read"


async def test_a_cancelled_waiter_does_not_cancel_the_read_for_others(members: Members) -> None:
    go, reads = asyncio.Event(), []

    async def slow(**arguments: Any) -> Any:
        reads.append(arguments)
        await go.wait()
        return answer(1)

    members._read = slow  # type: ignore[assignment]
    impatient, patient = (asyncio.create_task(members.refresh()) for _ in range(2))
    while not reads:
        await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.wait([impatient])
    go.set()
    await patient
    assert impatient.cancelled() and members.redis_ok and len(reads) == 1


async def test_a_read_that_fails_is_followed_by_another(members: Members) -> None:
    answers: list[Any] = [redis.ConnectionError("gone"), answer(5)]

    async def next_one(**arguments: Any) -> Any:
        told = answers.pop(0)
        if isinstance(told, Exception):
            raise told
        return told

    members._read = next_one  # type: ignore[assignment]
    await members.refresh()
    assert not members.redis_ok
    await members.refresh()
    assert members.redis_ok and members.errors == 1


async def test_a_redis_that_was_rolled_back_between_two_looks_is_not_believed(members: Members) -> None:
    """It answers all the time, and has forgotten slots that it had given out: their workers are there all the same."""
    answers = [answer(1), [b"1000", b"3"]]
    members.redis_ok, members._back_since = True, -1e9

    async def read(**arguments: Any) -> Any:
        return answers.pop(0)

    members._read = read  # type: ignore[assignment]
    for _ in range(2):
        await members.refresh()
        assert [worker.worker_id for worker in members.all] == ["w1"]
