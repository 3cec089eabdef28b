"""How our ranks are connected to those of one decode worker, and whether the pair's transport reaches them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer import messages as m
from kv_transfer.prefill_side.check_replies import check_number_of_ranks, check_same_agents
from kv_transfer.ranks import SendingRank
from kv_transfer.transports.base import PROBE_SECONDS
from wire import common_pb2, handoff_pb2

# As many as the idle connections that a NIXL agent keeps: other workers have no connection
MAX_WORKERS = 1024


def worker_key(decode: common_pb2.WorkerRef) -> str:
    """A decode worker at its address. Without TLS any process can be named as a decode worker at an address of its own:
    what it says counts for that address only."""
    return f"{decode.worker_id} at {decode.address}"


@dataclass
class Known:
    epoch: int = 0  # the last one received; 0 = none
    reached: bool = False  # by a probe


class KnownWorkers:
    """Facts about decode workers, by `worker_key`, that a prefill worker keeps after their streams have closed."""

    def __init__(self, max_workers: int = MAX_WORKERS):
        self._max_workers = max_workers
        self._workers: OrderedDict[str, Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def epoch(self, key: str) -> int:
        return self._workers.get(key, Known()).epoch

    def was_reached(self, key: str) -> bool:
        return self._workers.get(key, Known()).reached

    def has_epoch(self, key: str, epoch: int) -> None:
        self._met(key).epoch = epoch

    def is_reached(self, key: str) -> None:
        self._met(key).reached = True

    def _met(self, key: str) -> Known:
        known = self._workers.setdefault(key, Known())
        self._workers.move_to_end(key)
        while len(self._workers) > self._max_workers:
            self._workers.popitem(last=False)
        return known


@dataclass(eq=False)
class RankConnections:
    name: str  # the peer's, `LinkToDecode.key`
    prefill_id: str
    decode_key: str
    ranks: Sequence[SendingRank]
    known: KnownWorkers

    def __post_init__(self) -> None:
        self._welcome: handoff_pb2.Welcome | None = None  # the newest
        self._layout = common_pb2.KvLayout()  # of the first
        self._answer: asyncio.Future[bool] | None = None  # to the probe that waits
        self._closed = False

    @property
    def is_welcomed(self) -> bool:
        return self._welcome is not None

    def welcomed(self, welcome: handoff_pb2.Welcome) -> bool:
        """Take in a Welcome; a repeated one names new memory, which is connected at once. Returns whether it is the
        first. Raises TransportError if it lists too many ranks, or a repeated one other agents."""
        first = self._welcome is None
        if first:
            self._layout = welcome.layout
        check_number_of_ranks(welcome, self._layout)
        if self._welcome is not None:
            check_same_agents(welcome, self._welcome)
        self._welcome = welcome
        if not first:
            self.connect(welcome)
        return first

    def connect(self, welcome: handoff_pb2.Welcome, nonce: str = "", reconnect: bool = False) -> None:
        ranks = [
            m.PeerRank(r.rank, r.agent_name, r.agent_metadata, r.memory or m.DRAM) for r in welcome.ranks
        ]
        for rank in self.ranks:
            rank.handle(m.Connect(self.name, ranks, nonce, welcome.transport, reconnect, self.decode_key))

    async def probe(self, welcome: handoff_pb2.Welcome) -> bool:
        """Whether a notification from every rank arrives. Connections from an earlier link may have broken unnoticed:
        then a second one is sent, over new connections."""
        for reconnect in (False, True) if self.known.was_reached(self.decode_key) else (False,):
            if self._closed:
                return False
            self._answer = asyncio.get_running_loop().create_future()
            nonce = f"{self.prefill_id}:{secrets.token_hex(8)}"
            self.connect(self._welcome or welcome, nonce, reconnect)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_SECONDS):
                    if await self._answer:
                        self.known.is_reached(self.decode_key)
                        return True
        return False

    def probed(self, arrived: bool) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(arrived)

    def close(self, *, stay_connected: bool) -> None:
        self._closed = True
        self.probed(False)
        if not stay_connected:
            for rank in self.ranks:
                rank.handle(m.Disconnect(self.name))
