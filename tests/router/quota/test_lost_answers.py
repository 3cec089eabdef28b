"""Quotas over connections to a real Redis that break after a call was executed and before it was answered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from cluster.security.keys import RateLimits
from router.quota import unsettled
from router.quota.quota import ChargedRequest, Quota, Use
from router.quota.unsettled import Unsettled
from tests.harness.waiting import until

LIMITS = RateLimits(requests_per_minute=10, tokens_per_minute=600_000)  # so large that the leak does not show


class Way:
    """A unix socket that leads to Redis and can break the connection instead of passing on an answer."""

    def __init__(self, real: str, path: Path):
        self._real, self._path = real.removeprefix("unix://"), path
        self.url = f"unix://{path}"
        self.lose = 0  # answers, each with its connection
        self.lost = 0
        self.open = True

    async def __aenter__(self) -> Way:
        self._serving: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.open:
            writer.close()
            return
        there, back = await asyncio.open_unix_connection(self._real)
        ways = [
            asyncio.create_task(self._asks(reader, back)),
            asyncio.create_task(self._answers(there, writer)),
        ]
        self._serving.update(ways)
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ways:
                task.cancel()
            for end in (writer, back):
                end.close()

    async def _asks(self, reader: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            back.write(data)

    async def _answers(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await there.read(65536):
            if self.lose and data.startswith(b"*"):  # a script's, not the handshake's
                self.lose -= 1
                self.lost += 1
                return
            writer.write(data)


@pytest.fixture
async def way(redis_url, tmp_path, monkeypatch):
    monkeypatch.setattr("router.quota.scripts.CALL_SECONDS", 10.0)
    async with Way(redis_url, tmp_path / "way.sock") as made:
        yield made


@pytest.fixture
async def quota(way, namespace):
    made = Quota(way.url, namespace, CollectorRegistry())
    # The scripts are known to Redis from here on, and the connections are open.
    warm = await made.charge("t", LIMITS, 1, ChargedRequest("warm"))
    assert warm is not None
    await made.settle(warm, None)
    yield made
    await made.close()


async def test_a_charge_that_is_repeated_counts_once(quota, way, bucket):
    way.lose = 1
    charge = await quota.charge("t", LIMITS, 9000, ChargedRequest("r"))
    assert way.lost == 1 and charge is not None and charge.certain
    assert bucket() == (1, 9)


@pytest.mark.parametrize(("prompt", "output", "left"), [(1000, 1000, 2), (9000, 4000, 13)])
async def test_a_settlement_that_is_repeated_counts_once(quota, way, bucket, prompt, output, left):
    """Tokens are neither refunded nor charged twice."""
    other = await quota.charge("t", LIMITS, 20_000, ChargedRequest("other"))
    charge = await quota.charge("t", LIMITS, 9000, ChargedRequest("r"))
    assert charge is not None and other is not None
    way.lose = 1
    await quota.settle(charge, Use(prompt, output))
    assert way.lost == 1
    assert bucket() == (2, 20 + left)


@pytest.mark.parametrize("answer", [None, b"OK", 7, [], [0], [b"0", b"0", b"0"]], ids=repr)
async def test_an_answer_that_is_none_of_the_scripts_refuses_no_request(quota, monkeypatch, answer):
    async def lies(*arguments: Any) -> Any:
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(quota.scripts, "_charge", lies)
        charge = await quota.charge("t", LIMITS, 1, ChargedRequest("lied about"))
    assert charge is not None and not charge.certain


async def test_settlements_wait_while_redis_is_away(quota, way, bucket):
    charges = [await quota.charge("t", LIMITS, 9000, ChargedRequest(str(number))) for number in range(3)]
    assert bucket() == (3, 27)
    way.open, way.lose = False, 3
    for charge in charges:
        assert charge is not None
        await quota.settle(charge, Use(1000, 1000))
    assert quota.unsettled == 3, "those it could not say, and those it did not try to"
    way.open, way.lose = True, 0
    await until(lambda: quota.unsettled == 0, "they are said when Redis is back")
    assert bucket() == (3, 6)
    assert quota.settlements_dropped == 0


async def test_waiting_settlements_are_bounded(monkeypatch):
    monkeypatch.setattr(unsettled, "MAX_KEPT", 3)
    now = [0.0]
    waiting: Unsettled[int] = Unsettled(clock=lambda: now[0])
    for number in range(5):
        waiting.add(number)
        now[0] += 1.0
    assert (len(waiting), waiting.dropped, waiting.oldest()) == (3, 2, 2)
    waiting.done(1)  # it was dropped while it was said: the next one waits on
    assert waiting.oldest() == 2
    waiting.done(2)
    now[0] = 3.5 + unsettled.KEPT_SECONDS
    assert waiting.oldest() == 4 and waiting.dropped == 3
    now[0] = 5.0 + unsettled.KEPT_SECONDS
    assert waiting.oldest() is None and len(waiting) == 0
