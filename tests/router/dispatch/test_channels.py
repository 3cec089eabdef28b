"""Connections to workers that the registry has lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from router.dispatch.channels import Channels
from wire import common_pb2, decode_pb2, decode_pb2_grpc


class Worker(decode_pb2_grpc.DecodeServicer):
    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield common_pb2.AttemptEvent(beat=common_pb2.Beat(engine_step=1))
        await self.go_on.wait()
        yield common_pb2.AttemptEvent(beat=common_pb2.Beat(engine_step=2))


@pytest.fixture
async def worker():
    server = grpc.aio.server()
    servicer = Worker()  # type: ignore[abstract]  # the test calls no other method
    decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


async def next_step(call: Any) -> int:
    """Engine step of the stream's next message, a beat."""
    event = await asyncio.wait_for(call.read(), 60)
    assert isinstance(event, common_pb2.AttemptEvent)
    return event.beat.engine_step


async def test_a_stream_goes_on_though_the_registry_has_lost_its_worker(worker):
    servicer, address = worker
    channels = Channels()
    call = channels.decode(address).Attach(decode_pb2.AttachRequest())
    assert await next_step(call) == 1
    channels.keep_only(set())
    servicer.go_on.set()
    assert await next_step(call) == 2
    assert await asyncio.wait_for(call.read(), 60) is grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs
    again = channels.decode(address).Attach(decode_pb2.AttachRequest())
    assert await next_step(again) == 1
    again.cancel()
    await channels.close()
