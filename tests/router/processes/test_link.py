"""The link of a process and its parent outlives mistakes on either side."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest

from cluster.config.router import RouterConfig
from cluster.telemetry.exposition import OPEN_METRICS
from router.processes.child_process import ChildProcess
from router.processes.frames import encode, receive
from router.processes.parent_link import ParentLink


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    parents, childs = socket.socketpair()
    with parents, childs:
        parents.settimeout(10)
        yield parents, childs


async def test_a_scrape_that_fails_ends_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    parents, childs = ends
    answers: list[Any] = [RuntimeError("dictionary changed size during iteration"), []]

    def snapshot() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    link = ParentLink(childs)
    link.start(snapshot)
    for number, expected in ((1, None), (2, [])):
        parents.sendall(encode({"do": "scrape", "number": number}))
        assert await asyncio.to_thread(receive, parents) == {"scraped": number, "metrics": expected}
    assert not link.drain_wanted.is_set()
    parents.sendall(encode({"do": "drain"}))
    await asyncio.wait_for(link.drain_wanted.wait(), 10)
    assert not link.stop_wanted.is_set()
    parents.close()
    await asyncio.wait_for(link.stop_wanted.wait(), 10)


async def test_whatever_clients_accept_the_parent_is_asked_for_two_forms(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    parents, childs = ends
    link = ParentLink(childs)
    link.start(list)
    accepts = ["a/1" + "x" * 8000, "a/2", "", f"{OPEN_METRICS}; version=1.0.0", f"{OPEN_METRICS}, */*;q=0.1"]
    asked = [asyncio.create_task(link.metrics(accept)) for accept in accepts]
    for _ in range(2):
        accept = (await asyncio.to_thread(receive, parents) or {})["accept"]
        parents.sendall(encode({"do": "metrics", "accept": accept, "body": "b" + accept, "type": "t"}))
    plain, open_metrics = (b"b", "t"), (f"b{OPEN_METRICS}".encode(), "t")
    assert await asyncio.gather(*asked) == [plain] * 3 + [open_metrics] * 2


async def test_a_link_that_ends_by_a_mistake_ends_the_process(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    parents, childs = ends
    link = ParentLink(childs)
    link.start(list)
    parents.sendall(encode({"unknown": 1}))
    await asyncio.wait_for(link.drain_wanted.wait(), 10)
    await asyncio.wait_for(link.stop_wanted.wait(), 10)


async def test_the_parent_reads_on_behind_a_message_that_it_cannot_read() -> None:
    child = ChildProcess(0, cast(RouterConfig, None), cast(Any, None))
    child.started.set_result({})
    scrape = asyncio.create_task(child.scrape(10))
    await asyncio.sleep(0)  # asked
    reader = asyncio.StreamReader()
    reader.feed_data(encode({"scraped": 1, "metrics": [["too", "few"]]}))
    reader.feed_data(encode({"drained": True}))
    reader.feed_eof()
    await child._read(reader)
    assert await scrape is None
    assert child.drained.is_set()
