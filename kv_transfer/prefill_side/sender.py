"""The prefill worker's side of hand-offs: one control stream per decode worker, any number of hand-offs on it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from cluster import errors
from cluster.config.worker import TransferConfig
from cluster.faults.points import NO_FAULTS, Faults
from cluster.protocol.times import HANDOFF_STALL_SECONDS
from cluster.security.tls import Peers
from cluster.telemetry.metrics import worker as metrics
from kv_transfer import messages as m
from kv_transfer.contract import HandoffReport, HandoffSpec
from kv_transfer.layout.geometry import plan_flows
from kv_transfer.prefill_side.check_replies import check_ranks, read_grant
from kv_transfer.prefill_side.known_workers import KnownWorkers
from kv_transfer.prefill_side.link import ANSWER_SECONDS, LinkToDecode
from kv_transfer.prefill_side.part_times import PartTimes
from kv_transfer.prefill_side.pending_drain_notices import PendingDrainNotices
from kv_transfer.prefill_side.sender_rank import SenderRank
from kv_transfer.ranks import Rank
from wire import common_pb2, handoff_pb2

log = logging.getLogger(__name__)
TRANSPORTS = ("nixl", "grpc")
LAST_WORDS_SECONDS = 1.0  # how long a closing sender waits for acknowledgements of Drained


class OutgoingHandoff:
    """One hand-off at the sender. Made by HandoffSender.reserve; ends with `finish` or `abort`, once."""

    def __init__(self, sender: HandoffSender, link: LinkToDecode, spec: HandoffSpec, held_tokens: int):
        self._sender = sender
        self._link = link
        self._spec = spec
        self.held_tokens = held_tokens
        self.parts: PartTimes | None = None  # where the request is traced
        self._unopened: set[int] = set()  # ranks elsewhere that do not know of it yet
        self._gathered: dict[int, m.AllGathered] = {}
        self._drained_ranks: set[int] = set()
        loop = asyncio.get_running_loop()
        self._all_opened: asyncio.Future[None] = loop.create_future()
        self._all_gathered: asyncio.Future[None] = loop.create_future()
        self._committed: asyncio.Future[handoff_pb2.Committed] = loop.create_future()
        self._all_drained: asyncio.Future[None] = loop.create_future()
        self._closed = False
        self._progressed = 0.0
        self._source_ranks, self._target_ranks = len(sender.ranks), link.decode_layout.tensor_parallel
        # Whoever awaits them hears of a failure; nobody may.
        for future in (self._all_opened, self._all_gathered, self._committed, self._all_drained):
            future.add_done_callback(lambda f: f.cancelled() or f.exception())

    @property
    def transfer_id(self) -> bytes:
        return self._spec.transfer_id

    async def start(self, request_id: str) -> None:
        """From now on every layer the engine computes for `request_id` is sent. Await it before the engine
        hears of the request. Raises HandoffError; then call `abort`."""
        layout, peer = self._sender.layout, self._link
        flows = plan_flows(
            layout.num_kv_heads, layout.tensor_parallel, peer.decode_layout.tensor_parallel, self.transfer_id
        )
        # A rank in this process knows as soon as it is told. To others the engine's plan takes another way than
        # our messages do, and may overtake them: the first layers would be computed unnoticed.
        self._unopened = {i for i, rank in enumerate(self._sender.ranks) if not isinstance(rank, SenderRank)}
        for index, rank in enumerate(self._sender.ranks):
            rank.handle(
                m.OpenTransfer(
                    transfer_id=self.transfer_id,
                    request_id=request_id,
                    peer=peer.name,
                    transport=peer.transport,
                    flows=[flow for flow in flows if flow.source_rank == index],
                    held_tokens=self.held_tokens,
                    token_count=self._spec.token_count,
                    slot_bytes=peer.slot_bytes,
                    prefill_epoch=self._sender.worker.epoch,
                    decode_epoch=peer.decode.epoch,
                    acknowledge=index in self._unopened,
                    digests=peer.digests,
                    digest_kind=peer.digest_kind,
                )
            )
        if self._unopened:
            self._progressed = time.monotonic()
            await self._as_it_progresses(self._all_opened)

    async def finish(
        self, first_tokens: Sequence[common_pb2.Token], report: common_pb2.WorkReport
    ) -> HandoffReport:
        """Waits until D has every part and committed. Raises HandoffError; then call `abort`."""
        prefill_ended = self._progressed = time.monotonic()
        await self._as_it_progresses(self._all_gathered)
        flows = [
            handoff_pb2.FlowParts(source_rank=rank, target_rank=target, parts=parts)
            for rank, gathered in self._gathered.items()
            for target, parts in gathered.parts
        ]
        self._link.send(
            finish=handoff_pb2.Finish(
                transfer_id=self.transfer_id, first_tokens=first_tokens, flows=flows, report=report
            )
        )
        await self._as_it_progresses(self._committed)
        self._close()
        shipped = sum(gathered.bytes for gathered in self._gathered.values())
        parts = sum(count for gathered in self._gathered.values() for _, count in gathered.parts)
        # From its commit on the request is the decode worker's, and waits in its queue.
        exposed = max(0.0, time.monotonic() - prefill_ended - self._committed.result().commit_seconds)
        self._sender.handed_over(self._link.transport, shipped, exposed)
        return HandoffReport(self.held_tokens, shipped, parts, self._link.transport, exposed)

    async def _as_it_progresses(self, future: asyncio.Future[Any]) -> None:
        while not future.done():
            left = self._progressed + HANDOFF_STALL_SECONDS - time.monotonic()
            if left <= 0:
                raise errors.TransportError(
                    f"nothing of the hand-off was granted or landed for {HANDOFF_STALL_SECONDS:.0f} s"
                )
            await asyncio.wait([future], timeout=left)
        future.result()

    async def drained(self) -> None:
        """Wait, after `finish` or `abort`, until no rank will read the request's blocks any more. Raises CancelledError
        if the sender closes first."""
        await asyncio.shield(self._all_drained)

    def give_up_draining(self) -> None:  # this process ends: the blocks go to no other request
        self._all_drained.cancel()

    async def abort(self, reason: str, *, discard: bool = False) -> None:
        """Stops posting and tells D; says Drained once every write is terminal (in the background). `discard`: what was
        computed may be wrong, and D keeps none of it."""
        if self._closed:
            return
        words = handoff_pb2.AbortHandoff(transfer_id=self.transfer_id, reason=reason[:200], discard=discard)
        self._link.send(abort=words)
        self._close()

    def _close(self) -> None:
        self._closed = True
        for rank in self._sender.ranks:
            rank.handle(m.CloseTransfer(self.transfer_id))

    # --- events (on the loop) ----------------------------------------------------------------------------

    def on_rank_event(self, event: Any) -> None:
        match event:
            case m.SlotWanted():
                if self.parts is not None:
                    self.parts.asked(event.source_rank, event.target_rank, event.part, event.bytes)
                self._link.send(
                    slot_request=handoff_pb2.SlotRequest(
                        transfer_id=event.transfer_id,
                        source_rank=event.source_rank,
                        target_rank=event.target_rank,
                        part=event.part,
                        bytes=event.bytes,
                    )
                )
            case m.PartBytes():
                header = handoff_pb2.PartHeader.FromString(event.header)
                self._link.send(part=handoff_pb2.PartData(header=header, payload=event.payload))
            case m.TransferOpened():
                self._unopened.discard(event.source_rank)
                if not self._unopened and not self._all_opened.done():
                    self._all_opened.set_result(None)
            case m.AllGathered():
                self._gathered[event.source_rank] = event
                if len(self._gathered) == len(self._sender.ranks) and not self._all_gathered.done():
                    self._all_gathered.set_result(None)
            case m.TransferFailed():
                self.fail(errors.TransportError(event.reason))
            case m.TransferDrained():
                self._drained_ranks.add(event.source_rank)
                if len(self._drained_ranks) == len(self._sender.ranks):
                    if not self._all_drained.done():
                        self._all_drained.set_result(None)
                    self._sender.say_drained(self, self._link)

    def on_reply(self, reply: handoff_pb2.DecodeToPrefill) -> None:
        try:
            self._on_reply(reply)
        except errors.TransportError as error:  # an invalid reply ends its own hand-off only
            self.fail(error)

    def _on_reply(self, reply: handoff_pb2.DecodeToPrefill) -> None:
        match reply.WhichOneof("message"):
            case "slot_grant":
                grant = reply.slot_grant
                granted = read_grant(grant, self._source_ranks, self._target_ranks)
                self._progressed = time.monotonic()
                if self.parts is not None:
                    self.parts.granted(grant.source_rank, grant.target_rank, grant.part)
                self._sender.ranks[grant.source_rank].handle(granted)
            case "part_result":
                result = reply.part_result
                check_ranks(result.source_rank, result.target_rank, self._source_ranks, self._target_ranks)
                self._progressed = time.monotonic()
                if self.parts is not None and result.verified:
                    self.parts.verified(result.source_rank, result.target_rank, result.part)
                self._sender.count_part(result.verified)
                self._sender.ranks[result.source_rank].handle(
                    m.PartAnswered(result.transfer_id, result.target_rank, result.part, result.verified)
                )
            case "committed":
                if not self._committed.done():
                    self._committed.set_result(reply.committed)
            case "aborted":
                self.fail(errors.from_wire(reply.aborted.error))

    def fail(self, error: errors.BatonError) -> None:
        for future in (self._all_opened, self._all_gathered, self._committed):
            if not future.done():
                future.set_exception(error)


class HandoffSender:
    """All hand-offs of one prefill worker."""

    def __init__(
        self,
        *,
        worker: common_pb2.WorkerRef,
        layout: common_pb2.KvLayout,
        ranks: Sequence[Rank],
        config: TransferConfig,
        peers: Peers | None = None,
        faults: Faults = NO_FAULTS,
    ):
        """`peers` opens the control streams; default: plain text."""
        self.faults = faults
        self.peers = peers or Peers()
        self.worker = worker
        self.layout = layout
        self.ranks = ranks
        self.config = config
        self._links: dict[str, LinkToDecode] = {}
        self._live: dict[bytes, OutgoingHandoff] = {}
        self.known = KnownWorkers()
        self.mail = PendingDrainNotices(self._link, lambda decode: self.known.epoch(decode.worker_id))
        self._loop = asyncio.get_running_loop()
        self.handoffs = 0
        self.parts = 0
        self.resends = 0
        self.counts: Counter[str] = Counter()
        self.sent_bytes = Counter(dict.fromkeys(TRANSPORTS, 0))
        self.exposed_seconds = metrics.HANDOFF_EXPOSED.create()
        self.on_failed: Callable[[str], None] = lambda reason: None
        for rank in ranks:
            rank.on_event = self._from_rank

    @property
    def live(self) -> int:
        return len(self._live)

    async def reserve(
        self, decode: common_pb2.WorkerRef, spec: HandoffSpec, deadline_seconds: float
    ) -> OutgoingHandoff:
        """Asks D for a place to land. Raises BlocksExhaustedError, LayoutMismatchError, StaleEpochError,
        PeerLostError, DeadlineError, …; then nothing is held anywhere."""
        try:
            async with asyncio.timeout(deadline_seconds):
                link = await self._link(decode)
                reply = await link.ask_reserve(
                    handoff_pb2.Reserve(
                        transfer_id=spec.transfer_id,
                        request_id=spec.request_id,
                        spec=spec.spec,
                        token_count=spec.token_count,
                    )
                )
        except TimeoutError:
            message = f"{decode.worker_id} did not answer Reserve in time"
            if deadline_seconds <= ANSWER_SECONDS:
                raise errors.DeadlineError(message) from None
            raise errors.PeerLostError(message) from None  # there is time to ask another one
        if reply.HasField("refused"):
            self.counts["refused"] += 1
            raise errors.from_wire(reply.refused)
        handoff = OutgoingHandoff(self, link, spec, reply.held_tokens)
        self._live[spec.transfer_id] = handoff
        link.attach(handoff)
        self.handoffs += 1
        return handoff

    async def _link(self, decode: common_pb2.WorkerRef) -> LinkToDecode:
        name = f"{decode.worker_id}@{decode.epoch:x}"
        link = self._links.get(name)
        if link is None or link.lost:
            link = LinkToDecode(name, decode, self)
            self._links[name] = link
        await link.ready()
        return link

    def link_closed(self, link: LinkToDecode) -> None:
        if self._links.get(link.name) is link:
            del self._links[link.name]

    def say_drained(self, handoff: OutgoingHandoff, link: LinkToDecode) -> None:
        """Every write of the hand-off is terminal: D may reuse what it quarantined."""
        self._live.pop(handoff.transfer_id, None)
        link.detach(handoff)
        self.is_drained(link, handoff.transfer_id)

    def is_drained(self, link: LinkToDecode, transfer_id: bytes) -> None:
        """Send Drained on the open link, or on the worker's next one, until it is acknowledged."""
        current = self._links.get(link.name, link)
        lives = not current.lost and current.is_ready
        self.mail.keep(link.decode, transfer_id, current if lives else None)

    async def rejoin(self, worker: common_pb2.WorkerRef) -> None:
        """Under a new epoch, after this worker was fenced: what is under way ends, and is drained on new streams."""
        self.worker = worker
        for handoff in list(self._live.values()):
            await handoff.abort("this worker was fenced")
        for link in list(self._links.values()):
            await link.close()

    @property
    def digest_kinds(self) -> Sequence[str]:
        """Digest kinds for parts, in order of preference; the same for all ranks, whose devices are of one kind."""
        return self.ranks[0].hello.digest_kinds

    def handed_over(self, transport: str, shipped_bytes: int, exposed_seconds: float) -> None:
        self.counts["committed"] += 1
        self.sent_bytes[transport] += shipped_bytes
        self.exposed_seconds.observe(exposed_seconds)

    def links_by_transport(self) -> Counter[str]:
        """Open control streams to decode workers. Any thread."""
        links = Counter(dict.fromkeys(TRANSPORTS, 0))
        links.update(link.transport for link in list(self._links.values()) if link.is_ready)
        return links

    @property
    def staging_bytes(self) -> int:
        return max(self.config.staging_bytes, 2 * self.config.slot_bytes)

    @property
    def staging_used_bytes(self) -> int:
        """Of the ranks in this process."""
        return sum(rank.staging_used_bytes for rank in self.ranks if isinstance(rank, SenderRank))

    def count_part(self, verified: bool) -> None:
        if verified:
            self.parts += 1
        else:
            self.resends += 1

    def _from_rank(self, event: Any) -> None:
        """Called on a rank's thread."""
        try:
            self._loop.call_soon_threadsafe(self._dispatch, event)
        except RuntimeError:
            log.debug("an event came after the loop had closed: %r", type(event))

    def _dispatch(self, event: Any) -> None:
        if isinstance(event, m.ProbeFailed):
            link = self._links.get(event.peer)
            if link is not None:
                link.probe_failed(event.reason)
            return
        if isinstance(event, m.RankFailed):
            self.on_failed(f"rank {event.rank} sends nothing any more: {event.reason}")
            return
        handoff = self._live.get(event.transfer_id)
        if handoff is not None:
            handoff.on_rank_event(event)

    async def close(self) -> None:
        for handoff in list(self._live.values()):
            await handoff.abort("the prefill worker stops")
        deadline = time.monotonic() + 2.0
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for handoff in self._live.values():
            handoff.give_up_draining()
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while self._has_last_words() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self.mail.close()
        for link in list(self._links.values()):
            await link.close()
        for rank in self.ranks:
            await asyncio.to_thread(rank.close)

    def _has_last_words(self) -> bool:
        """Whether an open stream still waits for an acknowledgement of Drained."""
        return any(
            self.mail.waits_for(link.decode.worker_id) for link in self._links.values() if link.is_ready
        )
