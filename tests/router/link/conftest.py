"""A router's links to workers of this process, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cluster.errors import BatonError
from cluster.membership.types import WorkerInfo
from cluster.protocol.link import window_of
from router.link.links import Links
from router.link.token import Token
from tests.harness.linked_worker import LinkedWorker
from tests.harness.proxy import Proxy
from tests.harness.waiting import until
from wire import common_pb2
from worker.attempt_log import AttemptLog

PROMPT = 3


def info(worker: LinkedWorker) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        slot=1,
        role="decode",
        model_id="m",
        address="127.0.0.1:1",
        metrics_address="",
        layout=b"",
        place="",
        host="h",
        max_model_len=4096,
        blocks_total=64,
        link_address=worker.address,
    )


@dataclass
class Reading:
    """One attempt's reader: takes exactly the next position of each choice, as a request does."""

    transfer_id: bytes
    choices: int = 1
    tokens: list[list[int]] = field(default_factory=list)
    repeated: int = 0
    end: common_pb2.AttemptEnd | None = None
    error: BatonError | None = None
    taken_in: bool = True  # False: its worker may not have it yet
    fails: bool = False
    limit: int = 0
    handle: Any = None
    log: Any = None

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.choices)]
        self.limit = self.limit or PROMPT + window_of(self.choices)

    def positions(self) -> list[int]:
        return [PROMPT + len(one) for one in self.tokens]

    def limits(self) -> list[int]:
        return [self.limit] * self.choices

    def repeat_credit(self) -> None:
        for choice in range(self.choices):
            self.handle.credit(choice, self.limit)

    def token(self, token: Token) -> None:
        if self.fails:
            raise RuntimeError("broken reader")
        wanted = PROMPT + len(self.tokens[token.choice])
        assert token.position <= wanted, "a gap"
        if token.position < wanted:
            self.repeated += 1
        else:
            self.tokens[token.choice].append(token.token_id)

    def ended(self, end: common_pb2.AttemptEnd) -> None:
        assert self.end is None and self.error is None
        self.end = end

    def lost(self, error: BatonError) -> None:
        assert self.end is None and self.error is None
        self.error = error


@dataclass
class Pair:
    """One router and one worker."""

    worker: LinkedWorker = field(default_factory=lambda: LinkedWorker("d", 7))
    links: Links = field(default_factory=lambda: Links("r"))
    count: int = 0
    via: str = ""  # an address in front of the worker's

    @property
    def info(self) -> WorkerInfo:
        return replace(info(self.worker), link_address=self.via or self.worker.address)

    def read(self, choices: int = 1, *, opened: bool = True, **how: Any) -> Reading:
        """An attempt: its handle at the router, and what Run opens at the worker."""
        self.count += 1
        reading = Reading(self.count.to_bytes(16, "big"), choices, **how)
        reading.handle = self.links.open(self.info, reading)
        if opened:
            self.open(reading)
        return reading

    def open(self, reading: Reading) -> AttemptLog:
        spec = common_pb2.GenerateSpec(prompt_tokens=bytes(4 * PROMPT), n=reading.choices)
        reading.log = self.worker.open(reading.transfer_id, reading.handle.reference, spec)
        return reading.log

    @property
    def link(self) -> Any:
        (link,) = self.links._links.values()
        return link

    def cut(self) -> None:
        """As a reset between the two."""
        self.link._connection.abort()

    async def up(self) -> None:
        await until(lambda: self.links.up() == 1, "the link is up")


def tokens(log: AttemptLog, begin: int, count: int, choice: int = 0) -> None:
    for i in range(begin, begin + count):
        log.add(choice, PROMPT + i, i)


def end(log: AttemptLog) -> None:
    log.end(common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_DONE))


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    await made.worker.start()
    yield made
    async with asyncio.timeout(10):
        await made.links.close()
        await made.worker.stop()


@contextlib.asynccontextmanager
async def proxy_of(pair: Pair) -> AsyncIterator[Proxy]:
    """The network between the two."""
    proxy = Proxy(pair.worker.address)
    server = await asyncio.get_running_loop().create_server(proxy.accept, "127.0.0.1", 0)
    pair.via = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()


@pytest.fixture
async def network(pair: Pair) -> AsyncIterator[Proxy]:
    async with proxy_of(pair) as proxy:
        yield proxy
        await pair.links.close()
