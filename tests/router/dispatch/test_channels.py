"""Connections to workers that the registry has lost."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from router.dispatch.channels import Channels
from wire import decode_pb2, decode_pb2_grpc


class Worker(decode_pb2_grpc.DecodeServicer):
    def __init__(self) -> None:
        self.called = asyncio.Event()
        self.go_on = asyncio.Event()
        self.peers: set[str] = set()

    async def Abort(self, request: Any, context: Any) -> Any:
        self.peers.add(context.peer())
        self.called.set()
        await self.go_on.wait()
        return decode_pb2.AbortResponse(state=decode_pb2.ATTEMPT_STATE_COMMITTED)


@pytest.fixture
async def worker():
    server = grpc.aio.server()
    servicer = Worker()  # type: ignore[abstract]  # the test calls no other method
    decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_call_goes_on_though_the_registry_has_lost_its_worker(worker):
    servicer, address = worker
    channels = Channels()
    call = channels.decode(address).Abort(decode_pb2.AbortRequest())
    await asyncio.wait_for(servicer.called.wait(), 60)
    channels.keep_only(set())
    servicer.go_on.set()
    answer = await asyncio.wait_for(call, 60)
    assert answer.state == decode_pb2.ATTEMPT_STATE_COMMITTED
    again = await channels.decode(address).Abort(decode_pb2.AbortRequest(), timeout=60)
    assert again.state == decode_pb2.ATTEMPT_STATE_COMMITTED
    await channels.close()


async def test_calls_that_end_requests_have_a_connection_of_their_own(worker):
    """What holds the connection of the requests does not hold an Abort (rule 9 of the link)."""
    servicer, address = worker
    servicer.go_on.set()
    channels = Channels()
    stubs = [channels.decode(address), channels.decode(address, control=True)] * 2
    for stub in stubs:
        await stub.Abort(decode_pb2.AbortRequest(), timeout=60)
    assert len(servicer.peers) == 2, "one connection each, and kept open"
    channels.keep_only({address})
    assert channels.decode(address, control=True) is stubs[1]
    channels.keep_only(set())
    assert channels.decode(address, control=True) is not stubs[1]
    await channels.close()
