"""Connections to workers that the registry has lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from router.dispatch.channels import Channels
from wire import decode_pb2, decode_pb2_grpc


class Worker(decode_pb2_grpc.DecodeServicer):
    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[Any]:
        from wire import common_pb2

        yield common_pb2.AttemptEvent(beat=common_pb2.Beat(engine_step=1))
        await self.go_on.wait()
        yield common_pb2.AttemptEvent(beat=common_pb2.Beat(engine_step=2))


@pytest.fixture
async def worker():
    server, servicer = grpc.aio.server(), Worker()
    decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_stream_goes_on_though_the_registry_has_lost_its_worker(worker):
    servicer, address = worker
    channels = Channels()
    call = channels.decode(address).Attach(decode_pb2.AttachRequest())
    assert (await asyncio.wait_for(call.read(), 60)).beat.engine_step == 1
    channels.keep_only(set())
    servicer.go_on.set()
    assert (await asyncio.wait_for(call.read(), 60)).beat.engine_step == 2
    assert await asyncio.wait_for(call.read(), 60) is grpc.aio.EOF
    again = channels.decode(address).Attach(decode_pb2.AttachRequest())
    assert (await asyncio.wait_for(again.read(), 60)).beat.engine_step == 1
    again.cancel()
    await channels.close()
