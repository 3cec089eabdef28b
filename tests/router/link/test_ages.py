"""How old a link gets, and what becomes of it when certificates change (rule 12). Over TLS."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.local.certs import make_certs
from cluster.protocol.link import AGE_SPREAD, MAX_AGE_SECONDS, MOVE_SECONDS
from cluster.security.identity import make_identity
from cluster.security.tls import Peers
from router.link import link as links
from router.link import opener
from router.link.connection import Connection
from router.link.links import Links
from router.link.state import LinkState
from tests.harness.linked_worker import LinkedWorker
from tests.harness.waiting import until
from tests.router.link.conftest import Pair, tokens
from wire import link_pb2
from worker.link import connection as worker_connection

RENEWED_SECONDS = 10.0  # within which changed certificate files have a new link
CUT_SECONDS = 1.5  # in place of MOVE_SECONDS


@pytest.fixture(scope="module")
def authorities(tmp_path_factory) -> list[Path]:
    """Certificates of two authorities that do not trust each other."""
    found = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for directory in found:
        make_certs(directory, [], 2)
    return found


class Files:
    """The certificate files of one process, which a test replaces."""

    def __init__(self, directory: Path, role: str):
        self._directory = directory
        self._role = role
        self._written = 0
        directory.mkdir()

    def put(self, source: Path, *, trust: Path | None = None) -> None:
        """A certificate of `source`, and trust in that authority or another one."""
        self._copy(source / f"{self._role}.key", f"{self._role}.key")
        self._copy(source / f"{self._role}.pem", f"{self._role}.pem")
        self._copy((trust or source) / "ca.pem", "ca.pem")

    def _copy(self, source: Path, name: str) -> None:
        part = self._directory / f"{name}.part"
        shutil.copy(source, part)
        self._written += 1
        os.utime(part, ns=(self._written, self._written))
        part.replace(self._directory / name)

    def peers(self) -> Peers:
        at = self._directory
        return Peers(make_identity(at / f"{self._role}.pem", at / f"{self._role}.key", at / "ca.pem"))


@dataclasses.dataclass
class TlsPair(Pair):
    router_files: Any = None
    worker_files: Any = None

    @property
    def serial(self) -> int:
        """Of the link in use; 0: none is up."""
        connection = self.link._connection
        return connection.serial if connection is not None else 0

    async def refreshes(self) -> None:
        """As the router's reader of the registry does, four times a second."""
        while True:
            self.links.keep_only([self.info])
            await asyncio.sleep(0.1)


@pytest.fixture
async def secured(authorities, tmp_path) -> AsyncIterator[TlsPair]:
    files = Files(tmp_path / "router", "router"), Files(tmp_path / "worker", "worker")
    for one in files:
        one.put(authorities[0])
    worker = LinkedWorker("d", 7, peers=files[1].peers())
    made = TlsPair(worker, Links("r", files[0].peers()), router_files=files[0], worker_files=files[1])
    await made.worker.start()
    refreshing = asyncio.create_task(made.refreshes())
    yield made
    refreshing.cancel()
    async with asyncio.timeout(10):
        await made.links.close()
        await made.worker.stop()


def test_the_times_are_those_of_the_protocol():
    assert (MAX_AGE_SECONDS, AGE_SPREAD, MOVE_SECONDS) == (3600, 0.1, 60)


async def test_a_link_leaves_at_its_age(pair, monkeypatch):
    monkeypatch.setattr(worker_connection, "MAX_AGE_SECONDS", 0.8)
    one = pair.read()
    await pair.up()
    serials, made = set(), 0
    while made < 40:
        connection = pair.link._connection
        assert connection is not None, "it moved and did not break"
        serials.add(connection.serial)
        tokens(one.log, made, 1)
        made += 1
        await asyncio.sleep(0.1)
    await until(lambda: len(one.tokens[0]) == made, "all came")
    assert one.tokens == [list(range(made))] and not pair.worker.cancelled
    assert len(serials) >= 3


def test_ages_are_spread(monkeypatch):
    async def ages() -> list[float]:
        loop = asyncio.get_running_loop()
        make: Any = lambda connection: None  # noqa: E731
        port: Any = SimpleNamespace(forget=lambda connection: None)
        with socket.socket() as accepted:  # it is not opened before this coroutine ends
            made = [
                worker_connection.Connection(make, port, accepted, None, lambda whose: None)
                for _ in range(200)
            ]
        for one in made:
            one.abort()
        return [one._leave_at - loop.time() for one in made]

    found = asyncio.run(ages())
    assert min(found) >= 0.9 * MAX_AGE_SECONDS - 1 and max(found) <= 1.1 * MAX_AGE_SECONDS
    assert max(found) - min(found) > 0.1 * MAX_AGE_SECONDS


async def test_a_move_that_stalls_after_its_hello_costs_no_attempt(pair, monkeypatch):
    """From the hello on the worker sends nothing on the older connection, and cancels what does not attach in time."""
    one = pair.read()
    await pair.up()
    made: list[Connection] = []

    class Stalling(Connection):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            made.append(self)

        def data_received(self, data: bytes) -> None:
            if self is not made[0]:
                super().data_received(data)

    monkeypatch.setattr(opener, "Connection", Stalling)
    pair.link.move()
    await until(lambda: len(made) == 2 and pair.link._connection is made[1], "it moved at the second try")
    tokens(one.log, 0, 2)
    await until(lambda: one.tokens == [[0, 1]], "it goes on")
    assert one.error is None and not pair.worker.cancelled


async def test_a_router_that_does_not_move_is_cut(pair, monkeypatch):
    monkeypatch.setattr(worker_connection, "MAX_AGE_SECONDS", 0.3)
    monkeypatch.setattr(worker_connection, "MOVE_SECONDS", 0.8)
    one = pair.read()
    await pair.up()
    monkeypatch.setattr(pair.link, "move", lambda: None)
    connection = pair.link._connection
    await until(lambda: pair.link._connection is not connection, "it is cut")
    await pair.up()
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "the next one goes on")


async def test_only_a_routers_certificate_opens_a_link(secured, authorities, tmp_path):
    """One of a worker, of the same authority: a worker must not read what another one sends (mTLS roles)."""
    one = secured.read()
    await secured.up()
    files = Files(tmp_path / "other", "worker")
    files.put(authorities[0])
    intruder = Links("r", files.peers())
    two = type(one)(one.transfer_id)
    intruder.open(secured.info, two)
    await until(lambda: two.error is not None, "it is refused")
    await intruder.close()
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "the router's link goes on")


@pytest.mark.parametrize("side", ["router", "worker"])
async def test_changed_certificates_move_the_link_in_time(secured, authorities, side):
    one = secured.read()
    await secured.up()
    serial, began = secured.serial, asyncio.get_running_loop().time()
    tokens(one.log, 0, 10)
    (secured.router_files if side == "router" else secured.worker_files).put(authorities[0])
    await until(lambda: secured.serial > serial, "it moved")
    assert asyncio.get_running_loop().time() - began < RENEWED_SECONDS
    tokens(one.log, 10, 10)
    await until(lambda: len(one.tokens[0]) == 20, "nothing is lost")
    assert one.tokens == [list(range(20))] and not secured.worker.cancelled


@pytest.mark.parametrize("side", [pytest.param("router", marks=pytest.mark.long), "worker"])
async def test_a_removed_authority_opens_nothing_and_keeps_nothing(secured, authorities, monkeypatch, side):
    monkeypatch.setattr(worker_connection, "MOVE_SECONDS", CUT_SECONDS)
    monkeypatch.setattr(links, "MOVE_SECONDS", CUT_SECONDS)
    one = secured.read()
    await secured.up()
    began = asyncio.get_running_loop().time()
    files = secured.router_files if side == "router" else secured.worker_files
    files.put(authorities[0], trust=authorities[1])
    await until(lambda: one.error is not None, "it is lost")
    assert asyncio.get_running_loop().time() - began < RENEWED_SECONDS + CUT_SECONDS
    await asyncio.sleep(0.3)
    assert secured.serial == 0 and not any(
        one._transport is not None and not one._transport.is_closing()
        for one in secured.worker._listener._open
    )


async def test_a_link_that_does_not_move_at_once_is_tried_again(secured, authorities, monkeypatch, caplog):
    monkeypatch.setattr(links, "MOVE_PAUSE_SECONDS", 0.2)
    one = secured.read()
    await secured.up()
    serial = secured.serial
    greet, failures = secured.link._opener.greet, []

    async def fails(link: Any) -> Any:
        failures.append(link)
        raise OSError("no route")

    secured.link._opener.greet = fails
    secured.router_files.put(authorities[0])
    await until(lambda: len(failures) >= 3, "it was tried three times")
    assert caplog.text.count("no route") == 1, "each reason is logged once, not at every attempt"
    tokens(one.log, 0, 5)
    await until(lambda: len(one.tokens[0]) == 5, "the older one serves")
    assert secured.serial == serial
    secured.link._opener.greet = greet
    await until(lambda: secured.serial > serial, "it moved")
    assert not secured.worker.cancelled


async def test_an_older_connection_that_does_not_move_is_cut(pair, monkeypatch):
    """By the router too: the worker may not do it."""
    monkeypatch.setattr(links, "MOVE_SECONDS", 0.5)
    monkeypatch.setattr(links, "MOVE_PAUSE_SECONDS", 0.1)
    one = pair.read()
    await pair.up()
    older = pair.link._connection

    async def fails(link: Any) -> Any:
        raise OSError("no route")

    monkeypatch.setattr(pair.link._opener, "greet", fails)
    pair.link.move()
    await until(lambda: pair.link._connection not in (None, older), "it is cut, and opened again", 10.0)
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "it goes on")
    assert one.error is None


async def test_an_older_connections_notices_are_not_the_newer_ones(pair):
    def notice(kind: link_pb2.LinkNotice.ValueType) -> None:
        pair.link.take(older, link_pb2.WorkerFrame(notice=kind), 0)

    pair.read()
    await pair.up()
    older = pair.link._connection
    notice(link_pb2.LINK_NOTICE_MOVED)
    pair.link.move()
    await until(lambda: pair.link._connection is not older, "it moved")
    assert not pair.link._is_moved, "that was said of the older one"
    for kind in (link_pb2.LINK_NOTICE_GO_AWAY, link_pb2.LINK_NOTICE_FENCED, link_pb2.LINK_NOTICE_MOVED):
        notice(kind)
    assert pair.link.state is LinkState.UP and not pair.link._is_moved
