"""Watchers of health: their number is bounded, the oldest is closed for a new one, and closed ones are dropped."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2 as pb

from cluster.rpc.health import MAX_NAME_CHARACTERS, Health


class AbortError(Exception):
    pass


class Call:
    """A client that reads all that is written to it."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.read: list[int] = []
        self.code: grpc.StatusCode | None = None
        self._host = host

    def peer(self) -> str:
        return f"ipv4:{self._host}:{id(self) % 65536}"

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    async def write(self, message: pb.HealthCheckResponse) -> None:
        self.read.append(message.status)

    async def abort(self, code: grpc.StatusCode, *_: Any, **__: Any) -> None:
        self.code = code
        raise AbortError


async def watched(health: Health, call: Call) -> asyncio.Task[None]:
    task = asyncio.create_task(health.Watch(b"", call))  # type: ignore[arg-type]
    await settle()
    return task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_oldest_watcher_makes_room_and_no_other() -> None:
    health = Health(2)
    calls = [Call() for _ in range(4)]
    first, second = [await watched(health, call) for call in calls[:2]]
    assert not first.done() and not second.done(), "there is room for two"
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    third = await watched(health, calls[2])
    assert not first.done(), "the second one has gone"
    fourth = await watched(health, calls[3])
    with pytest.raises(AbortError):
        await asyncio.wait_for(first, 5)
    assert calls[0].code is grpc.StatusCode.RESOURCE_EXHAUSTED
    health.set({"": False})
    await settle()
    health.set({"another": False})
    await settle()
    serving, not_serving = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
    assert calls[2].read == calls[3].read == [serving, not_serving], "each change is sent once"
    for task in (third, fourth):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(third, fourth, return_exceptions=True)


async def test_watchers_of_one_address_end_none_of_another() -> None:
    health = Health(2)
    calls = [Call("10.0.0.1"), Call("10.0.0.2"), Call("10.0.0.2")]
    tasks = [await watched(health, call) for call in calls]
    assert [task.done() for task in tasks] == [False, True, False]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_service_that_leaves_serves_no_more() -> None:
    health, call = Health(1), Call()
    health.set({"baton.v1.Inference": True})
    health.leave()
    health.set({"": True, "baton.v1.Inference": True})
    for name in ("", "baton.v1.Inference"):
        request = pb.HealthCheckRequest(service=name).SerializeToString()
        answer = await health.Check(request, call)  # type: ignore[arg-type]
        assert answer.status == pb.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize(
    ("length", "code"),
    [
        (MAX_NAME_CHARACTERS, grpc.StatusCode.NOT_FOUND),
        (MAX_NAME_CHARACTERS + 1, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_name_has_a_length(length: int, code: grpc.StatusCode) -> None:
    call = Call()
    request = pb.HealthCheckRequest(service=length * "x").SerializeToString()
    with pytest.raises(AbortError):
        await Health(1).Check(request, call)  # type: ignore[arg-type]
    assert call.code is code
