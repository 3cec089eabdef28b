"""A stream on a real connection whose client takes nothing: its call still ends with a status."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from cluster.config.router import RouterConfig
from cluster.errors import CancelledError
from cluster.security.keys import ANYONE
from router.dispatch.turn import Turn
from router.frontends.grpc.refusal import generic_handler
from router.frontends.grpc.stream import GenerateStream
from router.link.token import PlainToken
from router.request.completion import Completion, Delta
from tests.router.frontends.grpc.stub_call import StubDispatcher
from tests.security.attacks.grpc_frames import NO_WINDOW, PREFACE, WINDOW_UPDATE, frame, whole_call
from wire import common_pb2

CREDIT = (1 << 16).to_bytes(4, "big")


class Served:
    """A server of one token, which is the first message of a call and its last one."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def Generate(self, messages: AsyncIterator[bytes], context: Any) -> None:
        dispatcher: Any = StubDispatcher()
        completion = Completion("one", "tiny", [1, 2], common_pb2.SamplingParams(seed=42))
        stream = GenerateStream(dispatcher, completion, ANYONE)
        passing = asyncio.ensure_future(
            stream.pass_to(context, RouterConfig(model="tiny", write_seconds=0.05), Turn())
        )
        await asyncio.sleep(0)
        dispatcher.queue.add(Delta(0, "a", (PlainToken(0, 2, 300),), None))
        try:
            await passing
        except BaseException as error:
            self.ended.set_result(error)
            raise


@pytest.fixture
async def served() -> AsyncIterator[tuple[Served, int]]:
    one, server = Served(), grpc.aio.server()
    server.add_generic_rpc_handlers((generic_handler("baton.v1.Inference", one.Generate),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield one, port
    await server.stop(None)


async def test_an_unread_first_message_is_followed_by_a_status(served: tuple[Served, int]) -> None:
    """It repeated the metadata, which gRPC refuses: a client that reads on would have waited for ever."""
    one, port = served
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        writer.write(PREFACE + NO_WINDOW + whole_call(b"/baton.v1.Inference/Generate", 1))
        assert isinstance(await asyncio.wait_for(one.ended, 20), CancelledError)
        writer.write(frame(WINDOW_UPDATE, 0, 1, CREDIT))
        received = b""
        async with asyncio.timeout(20):
            while b"grpc-status" not in received:
                received += await reader.read(65536)
    assert b"write_seconds" in received
