"""Messages of a call: in order, one at a time, and none after a failure."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import CancelledError
from router.frontends.grpc.call_writer import CallWriter
from tests.harness.virtual_time import VirtualLoop
from tests.harness.waiting import turns, until
from tests.router.frontends.grpc.stub_call import StubCall, context

LONG = 600.0


class Noted:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def resumed(self) -> None:
        self.calls.append("resumed")

    def discard(self, error: BaseException) -> None:
        self.calls.append(error)


@pytest.fixture
def call() -> StubCall:
    return StubCall()


@pytest.fixture
async def writer(call: StubCall) -> CallWriter:
    return CallWriter(context(call), LONG)


async def test_one_message_at_a_time_in_order(call: StubCall, writer: CallWriter) -> None:
    noted = Noted()
    writer.watch(noted)
    writer.write([b"a", b"b"])
    writer.write([b"c"])
    for count in (1, 2, 3):
        assert len(call.begun) == count and writer.paused and not noted.calls
        await call.read()
    assert call.begun == [b"a", b"b", b"c"] and not writer.paused and noted.calls == ["resumed"]
    writer.close()


async def test_written_waits_for_every_message(call: StubCall, writer: CallWriter) -> None:
    await writer.written()
    writer.write([b"a", b"b"])
    waiting = asyncio.ensure_future(writer.written())
    await turns()
    await call.read()
    assert not waiting.done()
    await call.read()
    await asyncio.wait_for(waiting, 5)
    writer.close()


async def test_a_write_that_ends_at_once_is_followed_by_the_next(writer: CallWriter) -> None:
    begun: list[bytes] = []

    class AtOnce(StubCall):
        async def write(self, message: bytes) -> None:
            begun.append(message)

    at_once = CallWriter(context(AtOnce()), LONG)
    at_once.write([b"a", b"b"])
    assert begun == [b"a", b"b"] and not at_once.paused
    await at_once.written()
    at_once.close()


async def test_after_a_failure_nothing_is_written(call: StubCall, writer: CallWriter) -> None:
    noted = Noted()
    writer.watch(noted)
    writer.write([b"a", b"b"])
    call.failure = ValueError("the client left")
    await call.read()
    writer.write([b"c"])
    assert call.begun == [b"a"] and noted.calls == [call.failure]
    with pytest.raises(ValueError, match="left"):
        await writer.written()
    late = Noted()
    writer.watch(late)
    assert late.calls == [call.failure]
    writer.close()


async def test_a_failure_ends_the_wait_for_the_last_message(call: StubCall, writer: CallWriter) -> None:
    writer.write([b"a"])
    waiting = asyncio.ensure_future(writer.written())
    await turns()
    call.failure = ValueError("the client left")
    await call.read()
    with pytest.raises(ValueError, match="left"):
        await asyncio.wait_for(waiting, 5)
    writer.close()


async def test_a_client_that_reads_nothing_fails_the_call(call: StubCall) -> None:
    writer, noted = CallWriter(context(call), 0.02), Noted()
    writer.watch(noted)
    writer.write([b"a", b"b"])
    await until(lambda: noted.calls, "it is noticed", 5)
    assert isinstance(noted.calls[0], CancelledError)
    await call.read()  # too late
    assert call.begun == [b"a"] and len(noted.calls) == 1
    writer.close()


async def test_a_call_without_messages_does_not_fail(call: StubCall) -> None:
    writer, noted = CallWriter(context(call), 0.001), Noted()
    writer.watch(noted)
    writer.write([b"a"])
    await call.read()
    later = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.02, later.set_result, None)
    await later
    assert noted.calls == ["resumed"]
    writer.close()


async def test_after_close_nothing_is_written_or_reported(call: StubCall, writer: CallWriter) -> None:
    noted = Noted()
    writer.watch(noted)
    writer.write([b"a", b"b"])
    writer.close()
    call.failure = ValueError("the client left")
    await call.read()
    writer.write([b"c"])
    assert call.begun == [b"a"] and not noted.calls


def test_time_in_which_the_router_was_stopped_does_not_count() -> None:
    """What the client has read meanwhile is known only later in the turn."""
    loop = VirtualLoop()
    noted = Noted()

    async def begin() -> CallWriter:
        made = CallWriter(context(StubCall()), 30.0)
        made.watch(noted)
        made.write([b"a"])
        return made

    writer = loop.run(begin())
    loop.stand_still(60.0)
    loop.settle()
    assert not noted.calls
    loop.pass_time(31.0)
    assert isinstance(noted.calls[0], CancelledError)
    writer.close()
    loop.close()


def test_a_write_that_begins_as_a_stopped_router_goes_on_has_its_usual_time() -> None:
    """Its check, late by an hour, gave it an hour more."""
    loop = VirtualLoop()
    noted = Noted()

    async def begin() -> CallWriter:
        made = CallWriter(context(StubCall()), 30.0)
        made.watch(noted)
        return made

    async def write(made: CallWriter) -> None:
        made.write([b"a"])

    writer = loop.run(begin())
    loop.stand_still(3600.0)
    loop.run(write(writer))
    loop.pass_time(38.0)
    assert isinstance(noted.calls[0], CancelledError)
    writer.close()
    loop.close()
