"""The health service alone: long messages, watchers that do not read, late watches."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from cluster.rpc.health import Health
from tests.security.attacks.grpc_frames import WATCH, unread


async def test_a_long_message_of_health_is_not_parsed() -> None:
    class Refused(Exception):
        pass

    class Call:
        async def send_initial_metadata(self, metadata: Any) -> None:
            pass

        async def abort(self, code: grpc.StatusCode, text: str, trailing_metadata: Any) -> None:
            raise Refused(code, text)

    unknown_field = b"\x12\xff\x7f" + b"x" * 16383  # the name is empty
    with pytest.raises(Refused, match="at most 256 characters"):
        await Health(4).Check(unknown_field, Call())  # type: ignore[arg-type]


async def test_a_watcher_that_does_not_read_stops_no_change() -> None:
    class Unread:
        async def send_initial_metadata(self, metadata: Any) -> None:
            pass

        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        async def write(self, message: Any) -> None:
            await asyncio.Event().wait()

    health = Health(4)
    watching = asyncio.create_task(health.Watch(b"", Unread()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    health.set({"": False})
    answer = await health.Check(b"", Unread())  # type: ignore[arg-type]
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize("newer", [0, 3])
async def test_a_late_watch_on_a_port_without_the_routers_limits_ends_without_an_error(
    newer: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As a worker's. Its status repeated the metadata of the unread message, which gRPC refuses."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Health(2, 0.2).handler(),))
    where = "127.0.0.1", server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with contextlib.ExitStack() as stack:
        stack.enter_context(unread(where, WATCH, 2))
        await asyncio.sleep(0.5)
        stack.enter_context(unread(where, WATCH, newer))
        await asyncio.sleep(0.5)
    await asyncio.sleep(0.2)
    await server.stop(0)
    assert not [one.getMessage() for one in caplog.records]
