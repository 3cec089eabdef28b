"""The decode worker's side of hand-offs: reserves, grants slots, collects parts, commits. It alone decides whether a
hand-off commits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from cluster import errors
from cluster.background_tasks import BackgroundTasks
from cluster.config.worker import TransferConfig
from cluster.faults.points import NO_FAULTS, Faults
from kv_transfer import messages as m
from kv_transfer.contract import DecodeEngine, HandoffState
from kv_transfer.decode_side import replies
from kv_transfer.decode_side.handshake import Handshake
from kv_transfer.decode_side.incoming import IncomingHandoff, ReceiverStats, accept, as_baton_error, error_of
from kv_transfer.decode_side.landing import Landing
from kv_transfer.decode_side.part_ledger import contradiction
from kv_transfer.decode_side.peer import PeerLink
from kv_transfer.decode_side.ring import IncomingPart, Ring, Slot
from kv_transfer.ranks import ReceivingRank, on_event_loop
from wire import common_pb2, handoff_pb2

MAX_DRAINING = 4096
ENOUGH_UNDER_WAY = 2  # slots granted to a hand-off: its next grant may wait for further messages


class HandoffReceiver:
    def __init__(
        self,
        *,
        worker: common_pb2.WorkerRef,
        layout: common_pb2.KvLayout,
        ranks: Sequence[ReceivingRank],
        addresses: Sequence[Sequence[int]],
        engine: DecodeEngine,
        config: TransferConfig,
        is_ended: Callable[[bytes], bool],
        faults: Faults = NO_FAULTS,
        on_exhausted: Callable[[str], None] = lambda reason: None,
    ):
        """`addresses[rank]`: of its first segment's slots. `is_ended`: whether a transfer id has ended here.
        `on_exhausted` is called once, when this worker must end because too many slots are in doubt."""
        self.stats = ReceiverStats()
        self.exhausted = ""  # the reason why no hand-off is accepted any more
        self._slot_bytes = config.slot_bytes
        self._ranks = ranks
        self._engine = engine
        self._is_ended = is_ended
        self._faults = faults
        self._on_exhausted = on_exhausted
        self._loop = asyncio.get_running_loop()
        self._live: dict[bytes, IncomingHandoff] = {}
        self._draining: set[bytes] = set()
        self._peers: dict[str, PeerLink] = {}
        self._background_tasks = BackgroundTasks()
        self._landing = Landing(
            ranks, addresses, config, granted=self._grant, grown=self._grown, exhausted=self._exhausted
        )
        self._handshake = Handshake(worker, layout, config, self._landing)
        from_rank = on_event_loop(self._dispatch)
        for rank in ranks:
            rank.start(from_rank)

    # --- peers' streams ----------------------------------------------------------------------------------

    async def serve(
        self, messages: AsyncIterator[handoff_pb2.PrefillToDecode]
    ) -> AsyncIterator[handoff_pb2.DecodeToPrefill]:
        """Body of Decode.Handoff: one prefill worker's stream, until either side ends it."""
        link = PeerLink(self, self._handshake, self._background_tasks.spawn, self._faults.messages())
        reading = self._loop.create_task(link.read(messages))
        try:
            async for reply in link.replies():
                yield reply
        finally:
            reading.cancel()
            self.peer_lost(link)

    def connected(self, link: PeerLink) -> None:
        self._peers[link.name] = link
        for rank in self._ranks:
            rank.handle(m.Wake())  # NIXL connects a pair only as fast as both sides poll

    def peer_lost(self, link: PeerLink) -> None:
        """End the peer's uncommitted hand-offs; their slots are in doubt until there is a proof."""
        link.end()  # first: from here on a Reserve must find the link closed
        if self._peers.get(link.name) is link:
            del self._peers[link.name]
        for transfer_id, handoff in list(self._live.items()):
            if handoff.link is link:
                error = errors.PeerLostError(f"the prefill worker {link.name} is gone")
                self._background_tasks.spawn(self._abort(transfer_id, error))

    def _grown(self) -> None:
        for link in self.links:  # of a peer that is replacing its link, both
            link.announce_memory()

    def _exhausted(self, reason: str) -> None:
        """Too many slots are in doubt: this worker finishes what it has and ends, and its end is a fence."""
        if not self.exhausted:
            self.exhausted = reason
            self._on_exhausted(reason)

    # --- requests of peers -------------------------------------------------------------------------------

    async def reserve(self, link: PeerLink, request: handoff_pb2.Reserve) -> None:
        """Reserve blocks; a repeated Reserve of the same stream gets the first answer again."""
        reply = handoff_pb2.ReserveReply(transfer_id=request.transfer_id)
        try:
            handoff = self._of(link, request.transfer_id) or await self._reserve(link, request)
            reply.held_tokens = handoff.reservation.held_tokens
        except Exception as error:
            self.stats.counts["refused"] += 1
            reply.refused.CopyFrom(as_baton_error(error, request.transfer_id).to_wire())
        link.send(handoff_pb2.DecodeToPrefill(reserve_reply=reply))

    async def _reserve(self, link: PeerLink, request: handoff_pb2.Reserve) -> IncomingHandoff:
        transfer_id = request.transfer_id
        if self._is_ended(transfer_id):
            raise errors.StaleTransferError(f"attempt {transfer_id.hex()} has ended", field="transfer_id")
        # It is another stream's: the end of that stream would end a hand-off of this one silently.
        if transfer_id in self._live:
            raise errors.StaleTransferError(f"attempt {transfer_id.hex()} is under way", field="transfer_id")
        if self.exhausted:
            raise errors.UnavailableError(f"the decode worker is leaving: {self.exhausted}")
        if link.closed:  # closed while this request was queued
            raise errors.PeerLostError("the prefill worker is gone")
        handoff = await accept(
            link, request, layout=self._handshake.layout, engine=self._engine, landing=self._landing
        )
        self._live[transfer_id] = handoff
        self.stats.counts["reserved"] += 1
        if link.closed:  # closed during the engine's call
            await self._abort(transfer_id, errors.PeerLostError("the prefill worker is gone"))
            raise errors.PeerLostError("the prefill worker is gone")
        return handoff

    def _of(self, link: PeerLink, transfer_id: bytes) -> IncomingHandoff | None:
        """The live hand-off, if it is this peer's."""
        handoff = self._live.get(transfer_id)
        return handoff if handoff is not None and handoff.link is link else None

    def slot_requested(self, link: PeerLink, request: handoff_pb2.SlotRequest) -> None:
        handoff = self._of(link, request.transfer_id)
        if handoff is None:
            self.stats.counts["stale"] += 1
            return
        error = handoff.parts.refused(request, self._slot_bytes)
        error = error or self.rings[request.target_rank].refused(link.name)
        if error is not None:
            self._background_tasks.spawn(self._abort(request.transfer_id, error))
            return
        if not handoff.parts.first_asked(request):
            self.stats.counts["stale"] += 1
            return
        if handoff.machine.state is HandoffState.RESERVED:
            handoff.machine.to(HandoffState.RECEIVING)
        part = IncomingPart(request.transfer_id, link.name, request.source_rank, request.part, request.bytes)
        self.rings[request.target_rank].ask(part)

    def _grant(self, rank: int, part: IncomingPart, slot: Slot) -> None:
        handoff = self._live.get(part.transfer_id)
        if handoff is None:
            # It has ended since its request. The peer did not get the grant, so no write can come.
            self._loop.call_soon(self.rings[rank].landed_wrong, slot)
            return
        seconds = part.bytes / self.stats.rate_bytes_per_second * 4 + 1.0
        grant = replies.slot_grant(part, slot, rank, self._landing.device(rank), seconds)
        self._landing.expect(grant, seconds + 1.0, self._too_late)
        # With enough slots the peer has parts to write meanwhile.
        delayable = handoff.under_way >= ENOUGH_UNDER_WAY
        handoff.link.send(handoff_pb2.DecodeToPrefill(slot_grant=grant), delayable=delayable)
        handoff.granted()

    def _too_late(self, slot: Slot) -> None:
        assert slot.part is not None, "a granted slot has one"
        self.stats.counts["late_parts"] += 1
        error = errors.TransportError("a part did not land within its deadline")
        self._background_tasks.spawn(self._abort(slot.part.transfer_id, error))

    def part_carried(self, link: PeerLink, part: handoff_pb2.PartData) -> None:
        """Pass a part on to its rank, once for each slot that the peer was granted: a rank with too many unread messages
        counts as failed, and its worker with it."""
        header, epochs = part.header, (link.prefill.epoch, self._handshake.worker.epoch)
        known = header.target_rank < len(self.rings) and (header.prefill_epoch, header.decode_epoch) == epochs
        if known and self.rings[header.target_rank].take_carried(header, link.name):
            self._ranks[header.target_rank].handle(part)
        else:
            self.stats.counts["stale_parts"] += 1

    async def finish(self, link: PeerLink, finish: handoff_pb2.Finish) -> None:
        transfer_id = finish.transfer_id
        handoff = self._of(link, transfer_id)
        if handoff is None:
            self.stats.counts["stale"] += 1
            link.send(replies.already_ended(transfer_id))
            return
        try:
            if handoff.finish is None:
                handoff.take_finish(finish)
            await self._commit_if_complete(handoff)
        except errors.TransportError as contradicted:
            await self._abort(transfer_id, contradicted)

    def drained(self, link: PeerLink, transfer_id: bytes) -> None:
        """Settle a Drained in the background, so that the peer's stream is read on. The peer repeats it until it is
        acknowledged, so repetitions and messages beyond the bound are dropped."""
        if transfer_id not in self._draining and len(self._draining) < MAX_DRAINING:
            self._draining.add(transfer_id)
            self._background_tasks.spawn(self._drain(link, transfer_id))

    async def _drain(self, link: PeerLink, transfer_id: bytes) -> None:
        """The peer has given the hand-off up, perhaps on a later stream than the hand-off's."""
        worker_id = link.prefill.worker_id
        try:
            handoff = self._live.get(transfer_id)
            if handoff is not None and handoff.link.prefill.worker_id == worker_id:
                freeing = self._end(transfer_id, errors.CancelledError("given up by the prefill worker"))
                if freeing is not None:  # in the background: the slots need not wait for the engine
                    self._background_tasks.spawn(freeing)
            await self._landing.drained(transfer_id, worker_id)
        finally:
            self._draining.discard(transfer_id)
        link.send(replies.drained_ack(transfer_id))

    async def abort_by_peer(self, link: PeerLink, message: handoff_pb2.AbortHandoff) -> None:
        if (handoff := self._of(link, message.transfer_id)) is not None:
            if message.discard:
                handoff.discard()
            await self._abort(message.transfer_id, errors.CancelledError(message.reason))

    # --- reports of ranks --------------------------------------------------------------------------------

    def _dispatch(self, event: m.FromReceiver) -> None:
        match event:
            case m.PartsLanded():
                for part in event.parts:
                    self._landed(part)
            case m.ProbeArrived():
                owner = event.nonce.rsplit(":", 1)[0]
                for link in self._peers.values():
                    if link.prefill.worker_id == owner:
                        link.send(replies.probe_arrived())
            case m.RankFailed():
                self._exhausted(f"rank {event.rank} receives no more parts: {event.reason}")
            case m.SegmentAdded():
                self._landing.segment_added(event)
            case m.Confirmed():
                self._landing.confirmed(event)

    def _landed(self, part: m.PartLanded) -> None:
        ring = self.rings[part.rank]
        slot = self._landing.landed(part)
        if slot is None:
            self.stats.counts["stale"] += 1  # its hand-off has ended; its slot is in quarantine
            return
        handoff = self._live.get(part.transfer_id)
        if handoff is not None:
            handoff.landed()
        if part.error:
            ring.landed_wrong(slot)
            if handoff is not None:
                self._part_failed(handoff, part)
            return
        ring.scattered(slot)
        if handoff is None:
            return
        handoff.part_verified(part)
        self.stats.part_verified(part)
        # Only the staging of this one part waits for the result.
        handoff.link.send(replies.part_result(part, verified=True), delayable=True)
        if handoff.parts.complete:
            self._background_tasks.spawn(self._commit_if_complete(handoff))

    def _part_failed(self, handoff: IncomingHandoff, part: m.PartLanded) -> None:
        """A corrupted part is sent once more; twice, or one that does not fit, ends the attempt."""
        self.stats.counts[f"part_{part.error}"] += 1
        if part.error == "digest" and handoff.parts.take_resend(part):
            handoff.link.send(replies.part_result(part, verified=False))
            return
        self._background_tasks.spawn(self._abort(part.transfer_id, error_of(part, handoff.link.agreement)))

    # --- the end of a hand-off ---------------------------------------------------------------------------

    async def _commit_if_complete(self, handoff: IncomingHandoff) -> None:
        finish = handoff.finish
        if (
            not handoff.parts.complete
            or handoff.committing
            or self._live.get(handoff.transfer_id) is not handoff
        ):
            return
        assert finish is not None, "complete includes it"
        if not handoff.parts.coverage.whole:
            gap = contradiction("parts that do not make up every layer of every token")
            await self._abort(handoff.transfer_id, gap)
            return
        handoff.begin_commit()
        await self._background_tasks.complete(self._commit(handoff, finish))

    async def _commit(self, handoff: IncomingHandoff, finish: handoff_pb2.Finish) -> None:
        transfer_id = handoff.transfer_id
        began = time.monotonic()
        failed: errors.BatonError | None = None
        try:
            await self._engine.commit(transfer_id, finish.first_tokens, finish.report)
            handoff.machine.to(HandoffState.COMMITTED)
        except Exception as error:
            failed = as_baton_error(error, transfer_id)
        finally:
            handoff.end_commit()
        if failed is not None:
            await self._abort(transfer_id, failed)
            return
        del self._live[transfer_id]
        self._landing.forget(transfer_id)
        self.stats.committed(handoff)
        seconds = time.monotonic() - began
        handoff.link.send(replies.committed(transfer_id, handoff.times.exposed_seconds, seconds))

    async def _abort(self, transfer_id: bytes, error: errors.BatonError) -> None:
        freeing = self._end(transfer_id, error)
        if freeing is not None:
            await self._background_tasks.complete(freeing)

    def _end(self, transfer_id: bytes, error: errors.BatonError) -> Coroutine[Any, Any, None] | None:
        """Put a hand-off's slots in doubt and inform the peer, at once. Returns what frees its blocks, or None if no such
        hand-off can be ended."""
        handoff = self._live.get(transfer_id)
        if handoff is None or handoff.committing:
            return None
        del self._live[transfer_id]
        handoff.machine.to(HandoffState.ABORTED)
        self.stats.counts["aborted"] += 1
        forgotten = self._landing.quarantine(transfer_id)
        handoff.link.send(replies.aborted(transfer_id, error))
        # A rank may be scattering one of its parts: the blocks are not free until the ranks have answered.
        return self._free(handoff, forgotten)

    async def _free(self, handoff: IncomingHandoff, forgotten: Sequence[asyncio.Future[None]]) -> None:
        await self._landing.answered(forgotten)
        await self._engine.abort(handoff.transfer_id, handoff.verified_tokens)

    async def abort(self, transfer_id: bytes, reason: errors.BatonError | None = None) -> HandoffState:
        """Abort an attempt, for `reason`, unless it commits: a commit in progress is waited for. Returns its state."""
        handoff = self._live.get(transfer_id)
        if handoff is not None and await handoff.ends_committed():
            return HandoffState.COMMITTED
        await self._abort(transfer_id, reason or errors.CancelledError("aborted by the router"))
        return HandoffState.ABORTED

    # --- the worker's life -------------------------------------------------------------------------------

    async def rejoin(self, worker: common_pb2.WorkerRef) -> None:
        """Take a new epoch after a fence. Live hand-offs end; every slot that is not free is in doubt."""
        self._handshake.rejoin(worker)
        for link in self.links:
            link.end()
        for transfer_id in list(self._live):
            await self._abort(transfer_id, errors.StaleEpochError("this worker was fenced"))
        for ring in self.rings:
            ring.fence_all()
        for rank in self._ranks:
            rank.handle(m.NewEpoch(worker.epoch))

    async def process_exited(self, peer: str) -> None:
        """Act on the proof that the process of `peer` (worker_id@epoch) has exited: its last writes need one more poll."""
        for link in self.links:
            if link.name == peer:
                self.peer_lost(link)
        await asyncio.sleep(0)  # its hand-offs' slots are in quarantine now
        await self._landing.process_exited(peer)

    @property
    def rings(self) -> list[Ring]:
        return self._landing.rings

    @property
    def links(self) -> set[PeerLink]:
        return {*self._peers.values(), *(handoff.link for handoff in self._live.values())}

    @property
    def live(self) -> int:
        return len(self._live)

    def check_integrity(self) -> None:
        self._landing.check_integrity()

    async def close(self) -> None:
        for transfer_id in list(self._live):
            await self._abort(transfer_id, errors.UnavailableError("the decode worker stops"))
        for link in self.links:
            link.end()
        self._landing.close()
        for rank in self._ranks:
            await asyncio.to_thread(rank.close)
