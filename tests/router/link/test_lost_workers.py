"""Workers that a link is lost to: gone, silent, restarted, fenced, or of another version."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import pytest

from cluster.errors import PeerLostError
from cluster.link.framing import to_frame
from router.link import backoff, opener
from router.link import links as all_links
from router.link.connection import Connection
from tests.harness.linked_worker import LinkedWorker
from tests.harness.waiting import until
from tests.router.link.conftest import Reading, info, tokens
from wire import link_pb2


async def test_a_worker_that_is_gone_is_lost_at_once(pair):
    one = pair.read()
    await pair.up()
    began = asyncio.get_running_loop().time()
    await pair.worker.stop()
    await until(lambda: one.error is not None, "it is lost")
    assert isinstance(one.error, PeerLostError)
    assert asyncio.get_running_loop().time() - began < 1.0
    assert pair.links.suspects == {"d@0000000000000007"}


async def test_a_worker_that_accepts_and_says_nothing_is_lost(pair, monkeypatch):
    monkeypatch.setattr(opener, "CONNECT_SECONDS", 0.5)
    silent = socket.create_server(("127.0.0.1", 0))
    worker = LinkedWorker("s", 1)
    worker._listener._socket = silent
    one = Reading(bytes(16))
    pair.links.open(info(worker), one)
    try:
        await until(lambda: one.error is not None, "it is lost")
    finally:
        silent.close()
    assert "no link to s" in str(one.error)


async def test_a_lost_worker_stays_excluded_while_its_link_is_tried_again(pair, monkeypatch):
    """Other requests would wait for it as long as the first one did."""
    monkeypatch.setattr(opener, "CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(backoff, "FIRST_SECONDS", 0.1)
    monkeypatch.setattr("router.link.link.LOST_PAUSE_SECONDS", 0.3)
    silent = socket.create_server(("127.0.0.1", 0))
    _, port = silent.getsockname()
    worker = LinkedWorker("s", 1)
    worker._listener._socket = silent
    one = Reading(bytes(16))
    pair.links.open(info(worker), one)
    try:
        await until(lambda: one.error is not None, "it is lost")
        await until(lambda: not pair.links._lost.names(), "no time excludes it")
        assert pair.links.suspects == {"s@0000000000000001"}
    finally:
        silent.close()
    back = LinkedWorker("s", 1)
    await back.start(port)
    try:
        await until(lambda: not pair.links.suspects, "it answers")
    finally:
        await back.stop()


async def test_a_worker_that_calls_do_not_reach_is_excluded_though_its_link_is_up(pair, monkeypatch):
    """A firewall lets the link through alone: each request that was placed there waited 5 s for its call, without end."""
    monkeypatch.setattr(backoff, "FIRST_SECONDS", 0.2)
    one = pair.read()
    await pair.up()
    name = pair.link.worker.name
    pair.links.not_reached(name)
    pair.links.reached(name)
    pair.links.not_reached(name)
    assert not pair.links.suspects, "a connection may break at any time"
    pair.links.not_reached(name)
    assert pair.links.suspects == {name} and one.error is None
    await until(lambda: not pair.links.suspects, "it is tried again")
    pair.links.not_reached(name)
    assert pair.links.suspects == {name}, "the next call shows that nothing has changed"


async def test_a_connection_that_ends_behind_its_welcome_is_tried_again(pair, monkeypatch):
    made: list[Connection] = []

    class Ending(Connection):
        ended = False

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not made:
                made.append(self)
                self.abort()
                self.connection_lost(None)  # in the same turn as the welcome

        def connection_lost(self, error: Exception | None) -> None:
            if not self.ended:
                super().connection_lost(error)
            self.ended = True

    monkeypatch.setattr(opener, "Connection", Ending)
    one = pair.read()
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "over another one", 3.0)
    assert made


async def test_a_silent_worker_is_suspect_then_lost(pair, monkeypatch):
    monkeypatch.setattr(all_links, "SUSPECT_SECONDS", 0.7)
    monkeypatch.setattr(all_links, "LOST_SECONDS", 1.5)
    one = pair.read()
    await pair.up()
    await asyncio.sleep(1.0)
    assert not pair.links.suspects, "beats come"
    pair.worker.hangs = True
    await until(lambda: pair.links.suspects, "it is suspect")
    assert one.error is None and pair.links.silent() == 1
    await until(lambda: one.error is not None, "it is lost")
    assert "no message received" in str(one.error)


async def test_a_router_that_was_stopped_loses_nobody(pair):
    one = pair.read()
    await pair.up()
    before = pair.link._received_at
    pair.links._due -= 10  # as if the tick came 10 s late
    pair.link._received_at -= 10
    pair.links._timer.cancel()
    pair.links._tick()
    assert one.error is None and pair.link._received_at >= before
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "it goes on")


async def test_a_fenced_worker_ends_everything_of_its_epoch(pair):
    one = pair.read()
    await pair.up()
    pair.worker.epoch = 8
    pair.worker.routers.fence()
    await until(lambda: one.error is not None, "it is lost")
    assert "fenced" in str(one.error)


async def test_a_fence_also_ends_links_that_have_not_attached(pair):
    host, _, port = pair.worker.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    hello = link_pb2.LinkHello(
        min_version=1, max_version=1, incarnation=5, serial=1, worker_id=pair.worker.worker_id, epoch=7
    )
    writer.write(to_frame(link_pb2.RouterFrame(hello=hello)))
    await reader.readexactly(4)
    pair.worker.routers.fence()
    assert await asyncio.wait_for(reader.read(), 5)
    assert reader.at_eof()
    writer.close()


async def test_another_life_at_the_address_is_no_welcome(pair):
    one = pair.read(opened=False)
    pair.worker.epoch = 8
    await until(lambda: one.error is not None, "it is lost")
    assert "another epoch" in str(one.error)


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:99999", "a" * 70 + ":1"])
async def test_a_registration_with_a_wrong_address_loses_its_worker(pair, address):
    one = Reading(bytes(16))
    pair.links.open(replace(info(pair.worker), worker_id="wrong", link_address=address), one)
    await until(lambda: one.error is not None, "it is lost")
    assert isinstance(one.error, PeerLostError) and "wrong" in str(one.error)


async def test_no_link_is_opened_to_a_worker_of_another_version(pair):
    old = replace(info(pair.worker), worker_id="old", link_address="", link_min_version=0, link_max_version=0)
    pair.links.keep_only([old, info(pair.worker)])
    await pair.up()
    assert list(pair.links._links) == [info(pair.worker).name]
