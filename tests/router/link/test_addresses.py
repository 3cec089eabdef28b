"""Addresses of links: IPv6 in brackets, IPv4, and names."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import uvloop

from router.link import opener
from tests.harness.linked_worker import LinkedWorker
from tests.harness.waiting import until
from tests.router.link.conftest import Pair, end, tokens


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("host", "shown"),
    [("::1", "[::1]:"), ("[::1]", "[::1]:"), ("127.0.0.1", "127.0.0.1:"), ("localhost", "localhost:")],
)
def test_a_link_is_opened_at_an_address_of_either_family(host, shown, run):
    async def read() -> None:
        pair = Pair(LinkedWorker("d", 7, host=host))
        await pair.worker.start()
        try:
            assert pair.worker.address.startswith(shown)
            one = pair.read()
            tokens(one.log, 0, 3)
            await until(lambda: one.tokens == [[0, 1, 2]], "it is read")
            pair.cut()
            tokens(one.log, 3, 1)
            end(one.log)
            await until(lambda: one.end is not None, "it goes on over another connection")
            assert one.tokens == [[0, 1, 2, 3]] and one.error is None
        finally:
            await pair.links.close()
            await pair.worker.stop()

    run(asyncio.wait_for(read(), 30))


class Names:
    """An event loop that resolves each name to these addresses."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *hosts: str):
        self._loop = loop
        self._hosts = hosts
        self.tried: list[str] = []

    async def getaddrinfo(self, host: str, port: int, **how: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (one, port)) for one in self._hosts]

    async def sock_connect(self, connecting: socket.socket, address: tuple[str, int]) -> None:
        self.tried.append(address[0])
        if address[0] == SILENT:
            await asyncio.sleep(60)
        if address[0] == UNREACHABLE:
            raise OSError("no route")
        await self._loop.sock_connect(connecting, address)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


HERE, REFUSES, SILENT, UNREACHABLE = "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"


@pytest.mark.parametrize("other", [REFUSES, SILENT, UNREACHABLE])
@pytest.mark.parametrize("was_up", [False, True])
async def test_a_name_of_several_addresses_is_one_of_them(pair, monkeypatch, other, was_up):
    """As one of each family, of which the worker listens at one."""
    monkeypatch.setattr(opener, "CONNECT_SECONDS", 1.0)
    one = pair.read()
    names = Names(asyncio.get_running_loop(), other, HERE)
    pair.link._opener._loop = names
    if was_up:
        await pair.up()
        names.tried.clear()
        pair.cut()
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]] or one.error is not None, "it is read")
    assert one.error is None and names.tried[:2] == [other, HERE]


@pytest.mark.parametrize(("other", "at_once"), [(REFUSES, True), (UNREACHABLE, False)])
async def test_a_worker_is_gone_where_all_of_its_addresses_refuse(pair, other, at_once):
    one = pair.read()
    await pair.up()
    names = Names(asyncio.get_running_loop(), other, HERE)
    pair.link._opener._loop = names
    await pair.worker.stop()
    await until(lambda: one.error is not None, "it is lost")
    assert ("refuses" in str(one.error)) == at_once and (len(names.tried) == 2) == at_once
