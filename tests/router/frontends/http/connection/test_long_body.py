"""Answers with megabytes of log probabilities are put together and written in slices."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import orjson

from router.frontends.http.connection.exchange import Exchange
from router.frontends.http.connection.long_body import SLICE_BYTES, Lists, LongResponse
from tests.harness.waiting import until


def test_lists_stand_where_they_were_put():
    lists = Lists()
    second = lists.add([b"3", b"4,5"])
    shown = {"a": [lists.add([b"1"]), second], "text": "\x00 0 \x00", "empty": lists.add([])}
    assert orjson.loads(b"".join(lists.encode(shown))) == {
        "a": [[1], [3, 4, 5]],
        "text": "\x00 0 \x00",
        "empty": [],
    }


class Transport:
    """Full with each write, until the client reads."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.flow: Any = SimpleNamespace(write_paused=False, drain=self.drain)
        self.may_read = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self.flow.write_paused = len(self.written) > 1

    async def drain(self) -> None:
        await self.may_read.wait()
        self.may_read.clear()
        self.flow.write_paused = False


async def test_a_long_answer_is_written_as_its_client_reads():
    pieces = [bytes([65 + i]) * (SLICE_BYTES // 2) for i in range(6)]
    transport = Transport()
    cycle: Any = SimpleNamespace(
        scope={"type": "http", "http_version": "1.1", "headers": []},
        receive=None,
        flow=transport.flow,
        transport=transport,
        response_started=False,
        disconnected=False,
        default_headers=[],
        keep_alive=True,
        message_event=asyncio.Event(),
        on_response=lambda: None,
    )
    sending = asyncio.ensure_future(Exchange(cycle, lambda: None).send(LongResponse(pieces)))
    await until(lambda: len(transport.written) == 2, "head and first piece are written")
    head, *body = transport.written
    assert b"content-length: %d\r\n" % (3 * SLICE_BYTES) in head and len(body) == 1
    for _ in range(2):
        transport.may_read.set()
        await asyncio.sleep(0.01)
    await asyncio.wait_for(sending, 5)
    body = transport.written[1:]
    assert b"".join(body) == b"".join(pieces) and max(map(len, body)) <= SLICE_BYTES


def test_a_piece_that_is_longer_than_a_slice_is_cut():
    pieces = [b"[", b"x" * (3 * SLICE_BYTES + 5), b"]"]
    slices = list(LongResponse(pieces).slices())
    assert b"".join(slices) == b"".join(pieces)
    assert max(map(len, slices)) <= SLICE_BYTES
