"""The prefill worker's side of hand-offs: any number of them over one link per decode worker."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster import errors
from cluster.config.worker import TransferConfig
from cluster.faults.points import NO_FAULTS, Faults
from cluster.rpc.message_size import MESSAGE_LIMITS
from cluster.security.tls import Peers
from kv_transfer import messages as m
from kv_transfer.memory import staging_bytes
from kv_transfer.prefill_side.handoff import OutgoingHandoff
from kv_transfer.prefill_side.link import ANSWER_SECONDS, LinkToDecode, link_key
from kv_transfer.prefill_side.pending_drain_notices import PendingDrainNotices
from kv_transfer.prefill_side.rank_connections import KnownWorkers, worker_key
from kv_transfer.prefill_side.stats import SenderStats, by_transport
from kv_transfer.ranks import SendingRank, on_event_loop
from kv_transfer.transports.registry import usable
from wire import common_pb2, handoff_pb2

CHANNEL_OPTIONS = [
    *MESSAGE_LIMITS,
    # A link that replaces another needs a connection of its own: certificates are checked when one is opened.
    ("grpc.use_local_subchannel_pool", 1),
]
ABORT_SECONDS = 2.0  # how long a closing sender waits for pending writes
LAST_NOTICES_SECONDS = 1.0  # how long it then waits for acknowledgements of Drained


@dataclass(eq=False, kw_only=True)
class HandoffSender:
    """All hand-offs of one prefill worker; the owner of its links."""

    worker: common_pb2.WorkerRef
    layout: common_pb2.KvLayout
    ranks: Sequence[SendingRank]
    config: TransferConfig
    peers: Peers = field(default_factory=Peers)  # opens the control streams; default: plain text
    faults: Faults = NO_FAULTS
    on_failed: Callable[[str], None] = lambda reason: None  # called when a rank has failed

    def __post_init__(self) -> None:
        self.known = KnownWorkers()
        self.notices = PendingDrainNotices(
            self.open, lambda decode: self.known.epoch(worker_key(decode)), worker_key
        )
        self.stats = SenderStats()
        self._links: dict[str, LinkToDecode] = {}  # for the next hand-offs, by their keys
        self._replaced: set[LinkToDecode] = set()  # until their own hand-offs have ended
        self._live: dict[bytes, OutgoingHandoff] = {}
        from_rank = on_event_loop(self._dispatch)
        for rank in self.ranks:
            rank.start(from_rank)

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def staging_bytes(self) -> int:
        return staging_bytes(self.config)

    @property
    def staging_used_bytes(self) -> int:
        """Staging in use by the ranks in this process."""
        return sum(rank.staging_used_bytes for rank in self.ranks)

    def links_by_transport(self) -> Counter[str]:
        """Number of open links. Any thread."""
        links = by_transport()
        links.update(link.agreement.transport for link in self._open_links() if link.is_ready)
        return links

    async def open(self, decode: common_pb2.WorkerRef) -> LinkToDecode:
        """The link to a decode worker; a new one if there is none, or only an outdated one. Raises BatonError."""
        link = self._links.get(link_key(decode))
        if link is not None and not link.lost and link.is_outdated():
            link.mark_replaced()
            self._replaced.add(link)
            link = None
        if link is None or link.lost:
            link = LinkToDecode(
                decode,
                self._hello(decode),
                self.ranks,
                self,
                channel=self.peers.channel(decode.address, CHANNEL_OPTIONS),
                known=self.known,
                at_message=self.faults.messages(),
                certificates=lambda: self.peers.version,
            )
            self._links[link.key] = link
        await link.ready()
        return link

    def _open_links(self) -> list[LinkToDecode]:
        return [*list(self._links.values()), *list(self._replaced)]

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

    async def reserve(
        self, decode: common_pb2.WorkerRef, reserve: handoff_pb2.Reserve, deadline_seconds: float
    ) -> OutgoingHandoff:
        """Reserve the hand-off's blocks at the decode worker. Raises BlocksExhaustedError, LayoutMismatchError,
        StaleEpochError, PeerLostError, DeadlineError, …; then nothing is held anywhere."""
        try:
            async with asyncio.timeout(deadline_seconds):
                link = await self.open(decode)
                reply = await link.ask_reserve(reserve)
        except TimeoutError:
            message = f"{decode.worker_id} did not answer Reserve in time"
            if deadline_seconds <= ANSWER_SECONDS:
                raise errors.DeadlineError(message) from None
            raise errors.PeerLostError(message) from None  # there is time to try another worker
        if reply.HasField("refused"):
            self.stats.refused += 1
            raise errors.from_wire(reply.refused)
        return self._begin(reserve, reply.held_tokens, link)

    def _begin(self, reserve: handoff_pb2.Reserve, held_tokens: int, link: LinkToDecode) -> OutgoingHandoff:
        handoff = OutgoingHandoff(
            reserve,
            held_tokens,
            link=link,
            ranks=self.ranks,
            stats=self.stats,
            on_drained=self._drained,
        )
        self._live[reserve.transfer_id] = handoff
        link.attach(handoff)
        self.stats.handoffs += 1
        return handoff

    def _drained(self, handoff: OutgoingHandoff) -> None:
        """Every write of the hand-off is terminal: the decode worker may reuse the slots in quarantine."""
        self._live.pop(handoff.transfer_id, None)
        handoff.link.detach(handoff)
        self.drained(handoff.link, handoff.transfer_id)

    # --- reports of links and ranks ------------------------------------------------------------------------

    def opened(self, link: LinkToDecode) -> None:
        self.notices.hand_over(link.decode, link)

    def closed(self, link: LinkToDecode) -> None:
        self._replaced.discard(link)
        if self._links.get(link.key) is link:
            del self._links[link.key]

    def has_another(self, link: LinkToDecode) -> bool:
        others = (one for one in self._open_links() if one is not link and not one.lost)
        return any(one.key == link.key for one in others)

    def drained(self, link: LinkToDecode, transfer_id: bytes) -> None:
        """Send Drained on the hand-off's link, or once that is lost on the worker's next one, until it is acknowledged.

        Two links have no order: on another one it could overtake the hand-off's abort, which may say that nothing is to
        be kept."""
        current = self._links.get(link.key, link) if link.lost else link
        is_open = not current.lost and current.is_ready
        self.notices.keep(link.decode, transfer_id, current if is_open else None)

    def drained_acknowledged(self, link: LinkToDecode, transfer_id: bytes) -> None:
        self.notices.acknowledged(worker_key(link.decode), transfer_id)

    def _dispatch(self, event: m.FromSender) -> None:
        match event:
            case m.ProbeFailed():
                if (link := self._links.get(event.peer)) is not None:
                    link.probe_failed(event.reason)
                return
            case m.RankFailed():
                self.on_failed(f"rank {event.rank} sends no more parts: {event.reason}")
                return
            case handoff_pb2.PartData():
                transfer_id = event.header.transfer_id
            case _:
                transfer_id = event.transfer_id
        if (handoff := self._live.get(transfer_id)) is not None:
            handoff.on_rank_event(event)

    # --- the worker's life ---------------------------------------------------------------------------------

    async def rejoin(self, worker: common_pb2.WorkerRef) -> None:
        """Continue under the new epoch of `worker` after this worker was fenced: hand-offs end, and are drained over new
        links."""
        await self._abort_all("this worker was fenced")
        self.worker = worker
        await self._close_links()

    async def close(self) -> None:
        await self._abort_all("the prefill worker stops")
        await _while(lambda: bool(self._live), ABORT_SECONDS)
        for handoff in self._live.values():
            handoff.stop_draining()
        await _while(self._waits_for_acknowledgements, LAST_NOTICES_SECONDS)
        self.notices.close()
        await self._close_links()
        for rank in self.ranks:
            await asyncio.to_thread(rank.close)

    async def _abort_all(self, reason: str) -> None:
        for handoff in list(self._live.values()):
            await handoff.abort(reason)

    async def _close_links(self) -> None:
        for link in self._open_links():
            await link.close()

    def _waits_for_acknowledgements(self) -> bool:
        links = self._links.values()
        return any(self.notices.waits_for(worker_key(link.decode)) for link in links if link.is_ready)


async def _while(holds: Callable[[], bool], seconds: float) -> None:
    """Wait while `holds()`, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while holds() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
