"""The link of a process and its parent outlives mistakes on either side."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest

from cluster.config.router import RouterConfig
from cluster.errors import UnavailableError
from cluster.telemetry.exposition import OPEN_METRICS
from router.processes import parent_link
from router.processes.child_process import ChildProcess
from router.processes.frames import encode, receive
from router.processes.parent_link import ParentLink
from tests.harness.waiting import turns


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


async def test_an_answer_to_an_earlier_scrape_is_not_taken_for_a_later_one() -> None:
    child = ChildProcess(0, cast(RouterConfig, None), cast(Any, None))
    child.started.set_result({})
    reader = asyncio.StreamReader()
    reading = asyncio.create_task(child._read(reader))
    first = asyncio.create_task(child.scrape(60))
    await turns()
    reader.feed_data(encode({"ask": "metrics"}))  # without the format
    assert await asyncio.wait_for(first, 10) is None, "it may have been the answer"
    second = asyncio.create_task(child.scrape(60))
    await turns()
    own = [["g", "help", "gauge", [["g", {}, 2.0, None]]]]
    reader.feed_data(encode({"scraped": 1, "metrics": []}))
    reader.feed_data(encode({"scraped": 2, "metrics": own}))
    found = await asyncio.wait_for(second, 10)
    assert found is not None and list(found) == ["g"]
    reader.feed_eof()
    await reading


async def test_a_process_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it goes on, it would answer all of them."""
    child, sent = ChildProcess(0, cast(RouterConfig, None), cast(Any, None)), list[Any]()
    child.started.set_result({})
    monkeypatch.setattr(child, "send", sent.append)
    for _ in range(3):
        assert await child.scrape(0.01) is None
    assert sent == [{"do": "scrape", "number": 1}]
    child._received({"scraped": 1, "metrics": []})
    assert await child.scrape(0.01) is None
    assert sent[1:] == [{"do": "scrape", "number": 2}]


async def test_a_parent_that_did_not_answer_is_asked_again(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    parents, childs = ends
    link = ParentLink(childs)
    link.start(list)
    with monkeypatch.context() as patch:
        patch.setattr(parent_link, "ANSWER_SECONDS", 0.05)
        with pytest.raises(UnavailableError, match="parent process"):
            await link.metrics("")
    asked = asyncio.create_task(link.metrics(""))
    for _ in range(2):
        assert await asyncio.to_thread(receive, parents) == {"ask": "metrics", "accept": ""}
    parents.sendall(encode({"do": "metrics", "accept": "", "body": "b", "type": "t"}))
    assert await asyncio.wait_for(asked, 10) == (b"b", "t")
