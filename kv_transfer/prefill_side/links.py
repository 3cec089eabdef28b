"""The links of one prefill worker: one for each decode worker that it has hand-offs with."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config.worker import TransferConfig
from cluster.faults.points import Faults
from cluster.security.tls import Peers
from kv_transfer.prefill_side.link import LinkToDecode
from kv_transfer.prefill_side.pending_drain_notices import PendingDrainNotices
from kv_transfer.prefill_side.rank_connections import KnownWorkers
from kv_transfer.prefill_side.stats import by_transport
from kv_transfer.ranks import SendingRank
from kv_transfer.transports.registry import usable
from wire import common_pb2, handoff_pb2

MAX_MESSAGE_BYTES = 64 << 20
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]
LAST_NOTICES_SECONDS = 1.0  # how long closing waits for acknowledgements of Drained


@dataclass(eq=False, kw_only=True)
class Links:
    worker: common_pb2.WorkerRef
    layout: common_pb2.KvLayout
    ranks: Sequence[SendingRank]
    config: TransferConfig
    peers: Peers  # opens the control streams
    faults: Faults

    def __post_init__(self) -> None:
        self._links: dict[str, LinkToDecode] = {}
        self.known = KnownWorkers()
        self.notices = PendingDrainNotices(self.open, lambda decode: self.known.epoch(decode.worker_id))

    def __getitem__(self, name: str) -> LinkToDecode | None:
        return self._links.get(name)

    def all(self) -> list[LinkToDecode]:
        return list(self._links.values())

    async def open(self, decode: common_pb2.WorkerRef) -> LinkToDecode:
        """The link to a decode worker, opened if there is none. Raises BatonError."""
        link = self._links.get(f"{decode.worker_id}@{decode.epoch:x}")
        if link is None or link.lost:
            link = LinkToDecode(
                decode,
                self._hello(decode),
                self.ranks,
                self,
                channel=self.peers.channel(decode.address, CHANNEL_OPTIONS),
                known=self.known,
                at_message=self.faults.messages(),
            )
            self._links[link.name] = link
        await link.ready()
        return link

    def _hello(self, decode: common_pb2.WorkerRef) -> handoff_pb2.Hello:
        ranks = [rank.hello for rank in self.ranks]
        return handoff_pb2.Hello(
            prefill=self.worker,
            decode_epoch=decode.epoch,
            layout=self.layout,
            ranks=[
                handoff_pb2.RankEndpoint(rank=r.rank, agent_name=r.agent_name, agent_metadata=r.metadata)
                for r in ranks
            ],
            transports=usable(self.config, ranks),
            digests=self.config.digests,
            digest_kinds=ranks[0].digest_kinds,  # the same for all: their devices are of one kind
        )

    # --- reports of links ----------------------------------------------------------------------------------

    def opened(self, link: LinkToDecode) -> None:
        self.notices.hand_over(link.decode, link)

    def closed(self, link: LinkToDecode) -> None:
        if self._links.get(link.name) is link:
            del self._links[link.name]

    def drained(self, link: LinkToDecode, transfer_id: bytes) -> None:
        """Send Drained on the open link, or on the worker's next one, until it is acknowledged."""
        current = self._links.get(link.name, link)
        is_open = not current.lost and current.is_ready
        self.notices.keep(link.decode, transfer_id, current if is_open else None)

    def drained_acknowledged(self, worker_id: str, transfer_id: bytes) -> None:
        self.notices.acknowledged(worker_id, transfer_id)

    # --- the worker ----------------------------------------------------------------------------------------

    def by_transport(self) -> Counter[str]:
        """Number of open links. Any thread."""
        links = by_transport()
        links.update(link.agreement.transport for link in self.all() if link.is_ready)
        return links

    async def rejoin(self, worker: common_pb2.WorkerRef) -> None:
        """Close all links; later ones are opened under the new epoch of `worker`."""
        self.worker = worker
        for link in self.all():
            await link.close()

    async def close(self) -> None:
        deadline = time.monotonic() + LAST_NOTICES_SECONDS
        while self._waits_for_acknowledgements() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self.notices.close()
        for link in self.all():
            await link.close()

    def _waits_for_acknowledgements(self) -> bool:
        return any(self.notices.waits_for(link.decode.worker_id) for link in self.all() if link.is_ready)
