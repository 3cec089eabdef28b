"""Many links that open at a time: each has as long as one alone (rule 5)."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from baton.local.certs import make_certs
from cluster.security.identity import make_identity
from cluster.security.tls import Peers
from router.link import handshakes
from router.link.handshakes import Handshakes
from router.link.links import Links
from tests.harness.linked_worker import LinkedWorker
from tests.harness.waiting import until
from tests.router.link.conftest import Pair


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(handshakes, "MAX_HANDSHAKES", 2)
    monkeypatch.setattr(handshakes, "HOLD_SECONDS", 60.0)


class Crowd:
    """Handshakes by number, each until it may end."""

    def __init__(self, count: int):
        self.handshakes = Handshakes()
        self.begun: list[int] = []
        self.may_end = [asyncio.Event() for _ in range(count)]
        self.tasks = [asyncio.create_task(self._run(number)) for number in range(count)]

    async def _run(self, number: int) -> None:
        async with self.handshakes.turn():
            self.begun.append(number)
            await self.may_end[number].wait()

    async def close(self) -> None:
        for one in self.may_end:
            one.set()
        await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), 10.0)
        assert not self.handshakes._running and not self.handshakes._waiting


async def test_few_handshakes_are_under_way_and_others_follow_in_order():
    crowd = Crowd(5)
    await asyncio.sleep(0.05)
    assert crowd.begun == [0, 1]
    crowd.may_end[1].set()
    await until(lambda: crowd.begun == [0, 1, 2], "the next one has begun")
    crowd.tasks[3].cancel()  # given up while it waits
    crowd.may_end[0].set()
    await until(lambda: crowd.begun == [0, 1, 2, 4], "none waits for that one")
    await crowd.close()


async def test_a_turn_that_is_given_up_as_it_comes_goes_to_the_next():
    crowd = Crowd(4)
    await asyncio.sleep(0.05)
    crowd.handshakes._end(next(iter(crowd.handshakes._running)))
    crowd.tasks[2].cancel()  # before it has run
    await until(lambda: crowd.begun == [0, 1, 3], "the last one has begun")
    await crowd.close()


async def test_one_that_is_not_answered_keeps_no_others_waiting(monkeypatch):
    monkeypatch.setattr(handshakes, "HOLD_SECONDS", 0.05)
    crowd = Crowd(5)
    await until(lambda: crowd.begun == [0, 1, 2, 3, 4], "all have begun, and none has ended")
    await crowd.close()


async def test_a_link_that_waits_for_its_turn_is_not_lost_by_that(tmp_path: Path):
    make_certs(tmp_path, [], 2)
    router, worker = (
        Peers(make_identity(tmp_path / f"{role}.pem", tmp_path / f"{role}.key", tmp_path / "ca.pem"))
        for role in ("router", "worker")
    )
    pair = Pair(LinkedWorker("d", 7, peers=worker), Links("r", router))
    await pair.worker.start()
    one = pair.read(opened=False, taken_in=False)
    await pair.up()
    async with AsyncExitStack() as others:
        for _ in range(handshakes.MAX_HANDSHAKES):
            await others.enter_async_context(pair.links._identity.handshakes.turn())
        pair.cut()
        await asyncio.sleep(1.5)  # longer than a link that broke has
        assert pair.links.up() == 0 and one.error is None
    await pair.up()
    assert one.error is None
    async with asyncio.timeout(10):
        await pair.links.close()
        await pair.worker.stop()
