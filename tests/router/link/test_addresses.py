"""Addresses of links: IPv6 in brackets, IPv4, and names."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

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
