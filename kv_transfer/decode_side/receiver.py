"""The decode worker's side of hand-offs: reserves, grants slots, collects parts, commits. D alone decides."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from cluster import errors
from cluster.background_tasks import FollowUps
from cluster.config.worker import TransferConfig
from cluster.faults.points import NO_FAULTS, Faults
from cluster.telemetry.metrics import worker as metrics
from kv_transfer import messages as m
from kv_transfer.contract import DecodeEngine, HandoffState
from kv_transfer.decode_side.incoming import IncomingHandoff, as_baton_error, error_of, untrue
from kv_transfer.decode_side.landing import Landing
from kv_transfer.decode_side.peer import PeerLink
from kv_transfer.decode_side.reserve import take_on
from kv_transfer.decode_side.ring import Slot, worker_of
from kv_transfer.decode_side.turns import Claim
from kv_transfer.ranks import ReceivingRank
from wire import common_pb2, handoff_pb2

log = logging.getLogger(__name__)
ASSUMED_RATE = 500e6  # bytes per second, before the first part was measured
MAX_DRAINING = 4096
ENOUGH_UNDER_WAY = 2  # slots granted to a hand-off: its next grant may wait for company


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
        on_exhausted: Callable[[str], None] = lambda reason: None,
        faults: Faults = NO_FAULTS,
    ):
        """`addresses[rank]`: of its first segment's slots. `is_ended`: which transfer ids are over here."""
        self.worker = worker
        self.layout = layout
        self.config = config
        self.faults = faults
        self._ranks = ranks
        self._engine = engine
        self._is_ended = is_ended
        self._loop = asyncio.get_running_loop()
        self._live: dict[bytes, IncomingHandoff] = {}
        self._links: dict[bytes, PeerLink] = {}  # of live hand-offs
        self._draining: set[bytes] = set()
        self._peers: dict[str, PeerLink] = {}
        self._rate = ASSUMED_RATE
        self.counts: Counter[str] = Counter()
        self.handoff_seconds = metrics.HANDOFF_SECONDS.create()
        self._follow_ups = FollowUps()
        self.spawn = self._spawn = self._follow_ups.spawn
        self.on_exhausted = on_exhausted
        self.exhausted = ""  # why nothing new is taken any more
        self.landing = Landing(
            ranks, addresses, config, granted=self._grant, grown=self._grown, exhausted=self._exhausted
        )
        self.rings = self.landing.rings
        for rank in ranks:
            rank.start(self._from_rank)

    # --- the pair's stream -------------------------------------------------------------------------------

    async def serve(
        self, requests: AsyncIterator[handoff_pb2.PrefillToDecode]
    ) -> AsyncIterator[handoff_pb2.DecodeToPrefill]:
        """Body of Decode.Handoff: one prefill worker's stream, until either side ends it."""
        link = PeerLink(self)
        reading = self._loop.create_task(link.read(requests))
        try:
            async for reply in link.replies():
                yield reply
        finally:
            reading.cancel()
            self.peer_lost(link)

    def peer_lost(self, link: PeerLink) -> None:
        """Its uncommitted hand-offs end; what they were granted is in doubt until the peer proves otherwise."""
        link.end()  # first: from here on a Reserve must find the link closed
        if self._peers.get(link.name) is link:
            del self._peers[link.name]
        for transfer_id, owner in list(self._links.items()):
            if owner is link:
                error = errors.PeerLostError(f"the prefill worker {link.name} is gone")
                self._spawn(self._abort(transfer_id, error))

    def land(self, rank: int, message: m.Land) -> None:
        """gRPC transport: bytes that came on the stream go to the rank they are for."""
        if rank < len(self._ranks):
            self._ranks[rank].handle(message)

    def _grown(self) -> None:
        """Before anything is granted in new memory, every peer learns of it."""
        for link in self._peers.values():
            link.welcome()

    def _exhausted(self, reason: str) -> None:
        """Too much is in doubt: this worker finishes what it has and ends, and its end is a fence."""
        if not self.exhausted:
            log.error("no new hand-offs: %s", reason)
            self.exhausted = reason
            self.on_exhausted(reason)

    def register(self, link: PeerLink) -> None:
        self._peers[link.name] = link
        for rank in self._ranks:
            rank.handle(m.Wake())  # NIXL sets a pair up only as fast as both sides poll

    # --- what the peer asks ------------------------------------------------------------------------------

    async def reserve(self, link: PeerLink, request: handoff_pb2.Reserve) -> None:
        """Reserve blocks; a repeated Reserve gets the first answer again."""
        reply = handoff_pb2.ReserveReply(transfer_id=request.transfer_id)
        try:
            handoff = self._live.get(request.transfer_id) or await self._reserve(link, request)
            reply.held_tokens = handoff.reservation.held_tokens
        except Exception as error:
            self.counts["refused"] += 1
            reply.refused.CopyFrom(as_baton_error(error).to_wire())
        link.send(reserve_reply=reply)

    async def _reserve(self, link: PeerLink, request: handoff_pb2.Reserve) -> IncomingHandoff:
        transfer_id = request.transfer_id
        if self._is_ended(transfer_id):
            raise errors.StaleTransferError(f"attempt {transfer_id.hex()} has ended", field="transfer_id")
        if self.exhausted:
            raise errors.UnavailableError(f"the decode worker leaves: {self.exhausted}")
        if link.closed:  # closed while this request was queued
            raise errors.PeerLostError("the prefill worker is gone")
        handoff = await take_on(link, request, layout=self.layout, engine=self._engine, landing=self.landing)
        self._live[transfer_id], self._links[transfer_id] = handoff, link
        self.counts["reserved"] += 1
        if link.closed:  # it went while the engine was asked
            await self._abort(transfer_id, errors.PeerLostError("the prefill worker is gone"))
            raise errors.PeerLostError("the prefill worker is gone")
        return handoff

    def slot_wanted(self, link: PeerLink, request: handoff_pb2.SlotRequest) -> None:
        handoff = self._live.get(request.transfer_id)
        if handoff is None or self._links.get(request.transfer_id) is not link:
            self.counts["stale"] += 1
            return
        error = handoff.refused_part(request, self.config.slot_bytes)
        error = error or self.rings[request.target_rank].refused(link.name)
        if error is not None:
            self._spawn(self._abort(request.transfer_id, error))
            return
        if not handoff.first_asked(request):
            self.counts["stale"] += 1
            return
        if handoff.machine.state is HandoffState.RESERVED:
            handoff.machine.to(HandoffState.RECEIVING)
        claim = Claim(request.transfer_id, link.name, request.source_rank, request.part, request.bytes)
        self.rings[request.target_rank].ask(claim)

    def _grant(self, rank: int, claim: Claim, slot: Slot) -> None:
        handoff = self._live.get(claim.transfer_id)
        link = self._links.get(claim.transfer_id)
        if handoff is None or link is None:
            # It ended between asking and now; nobody was told of the slot, so nobody writes to it.
            self._loop.call_soon(self.rings[rank].landed_wrong, slot)
            return
        seconds = claim.bytes / self._rate * 4 + 1.0
        self.landing.expect(claim, slot, rank, seconds + 1.0, self._too_late)
        if not handoff.first_part:
            handoff.first_part = time.monotonic()
        # The peer has parts to write meanwhile.
        link.grant(claim, rank, slot, seconds, patient=handoff.under_way >= ENOUGH_UNDER_WAY)
        handoff.under_way += 1

    def _too_late(self, slot: Slot) -> None:
        assert slot.claim is not None, "a granted slot has one"
        self.counts["late_parts"] += 1
        error = errors.TransportError("a part did not land within its deadline")
        self._spawn(self._abort(slot.claim.transfer_id, error))

    async def finish(self, link: PeerLink, finish: handoff_pb2.Finish) -> None:
        transfer_id = finish.transfer_id
        handoff = self._live.get(transfer_id)
        if handoff is None or self._links.get(transfer_id) is not link:
            self.counts["stale"] += 1
            error = errors.StaleTransferError("the hand-off has ended", field="transfer_id").to_wire()
            link.send(aborted=handoff_pb2.Aborted(transfer_id=transfer_id, error=error))
            return
        try:
            if handoff.finish is None:
                handoff.take_finish(finish)
            await self._commit_if_complete(handoff)
        except errors.TransportError as error:
            await self._abort(transfer_id, error)

    def drained(self, link: PeerLink, transfer_id: bytes) -> None:
        """Settle a Drained in the background, so that the peer's stream is read on. The peer repeats it until it is
        acknowledged, so repetitions and messages beyond the bound are dropped."""
        if transfer_id not in self._draining and len(self._draining) < MAX_DRAINING:
            self._draining.add(transfer_id)
            self._spawn(self._drain(link, transfer_id))

    async def _drain(self, link: PeerLink, transfer_id: bytes) -> None:
        """The peer has given it up, perhaps on a later stream than the one we still believe in."""
        worker_id = link.prefill.worker_id
        try:
            handoff = self._live.get(transfer_id)
            if handoff is not None and worker_of(handoff.peer) == worker_id:
                freeing = self._end(transfer_id, errors.CancelledError("given up by the prefill worker"))
                if freeing is not None:  # in the background: the slots need not wait for the engine
                    self._spawn(freeing)
            await self.landing.drained(transfer_id, worker_id)
        finally:
            self._draining.discard(transfer_id)
        link.send(drained_ack=handoff_pb2.DrainedAck(transfer_id=transfer_id))

    async def abort_by_peer(self, link: PeerLink, message: handoff_pb2.AbortHandoff) -> None:
        if self._links.get(message.transfer_id) is link:
            self._live[message.transfer_id].discard = message.discard
            await self._abort(message.transfer_id, errors.CancelledError(message.reason))

    # --- what ranks report -------------------------------------------------------------------------------

    def _from_rank(self, event: Any) -> None:
        """Called on a rank's thread."""
        try:
            self._loop.call_soon_threadsafe(self._dispatch, event)
        except RuntimeError:
            log.debug("an event came after the loop had closed: %r", type(event))

    def _dispatch(self, event: Any) -> None:
        match event:
            case m.PartsLanded():
                for part in event.parts:
                    self._landed(part)
            case m.ProbeArrived():
                owner = event.nonce.rsplit(":", 1)[0]
                for link in self._peers.values():
                    if link.prefill.worker_id == owner:
                        link.send(probe_result=handoff_pb2.ProbeResult(arrived=True))
            case m.RankFailed():
                self._exhausted(f"rank {event.rank} lands nothing any more: {event.reason}")
            case m.SegmentAdded():
                self.landing.segment_added(event)
            case m.Confirmed():
                self.landing.confirmed(event)

    def _landed(self, part: m.PartLanded) -> None:
        ring = self.rings[part.rank]
        slot = self.landing.landed(part)
        if slot is None:
            self.counts["stale"] += 1  # its hand-off ended meanwhile: the quarantine rules decide
            return
        handoff = self._live.get(part.transfer_id)
        link = self._links.get(part.transfer_id)
        if handoff is not None:
            handoff.under_way -= 1
        if part.error:
            ring.landed_wrong(slot)
            if handoff is not None and link is not None:
                self._part_failed(handoff, link, part)
            return
        ring.scattered(slot)
        if handoff is None or link is None:
            return
        handoff.part_verified(part)
        self.counts["parts"] += 1
        self.counts["bytes"] += part.bytes
        link.answer(part, True)
        if handoff.complete:
            self._spawn(self._commit_if_complete(handoff))

    def _part_failed(self, handoff: IncomingHandoff, link: PeerLink, part: m.PartLanded) -> None:
        """A corrupted part is sent once more; twice, or one that does not fit, ends the attempt."""
        self.counts[f"part_{part.error}"] += 1
        if part.error == "digest" and handoff.take_resend(part):
            link.answer(part, False)
            return
        self._spawn(self._abort(part.transfer_id, error_of(part, link.digests, link.digest_kind)))

    # --- the end of a hand-off ---------------------------------------------------------------------------

    async def _commit_if_complete(self, handoff: IncomingHandoff) -> None:
        transfer_id = handoff.spec.transfer_id
        finish = handoff.finish
        if not handoff.complete or handoff.committing or self._live.get(transfer_id) is not handoff:
            return
        assert finish is not None, "complete says so"
        if not handoff.covered:
            await self._abort(transfer_id, untrue("parts that do not make up every layer of every token"))
            return
        handoff.committing = True
        await self._follow_ups.complete(self._commit(handoff, finish))

    async def _commit(self, handoff: IncomingHandoff, finish: handoff_pb2.Finish) -> None:
        transfer_id = handoff.spec.transfer_id
        began = time.monotonic()
        failed: errors.BatonError | None = None
        try:
            await self._engine.commit(transfer_id, finish.first_tokens, finish.report)
            handoff.machine.to(HandoffState.COMMITTED)
        except Exception as error:
            failed = as_baton_error(error)
        finally:
            handoff.commit_ended()
        if failed is not None:
            await self._abort(transfer_id, failed)
            return
        self.counts["committed"] += 1
        self._rate += 0.2 * ((handoff.rate_bytes_per_second or self._rate) - self._rate)
        del self._live[transfer_id]
        link = self._links.pop(transfer_id)
        self.landing.forget(transfer_id)
        self.handoff_seconds.observe(time.monotonic() - handoff.reserved)
        link.send(committed=handoff.committed(began))

    async def _abort(self, transfer_id: bytes, error: errors.BatonError) -> None:
        freeing = self._end(transfer_id, error)
        if freeing is not None:
            await self._follow_ups.complete(freeing)

    def _end(self, transfer_id: bytes, error: errors.BatonError) -> Coroutine[Any, Any, None] | None:
        """At once put a hand-off's slots in doubt and tell the peer. Returns what frees its blocks; None: no such one."""
        handoff = self._live.get(transfer_id)
        if handoff is None or handoff.committing:
            return None
        del self._live[transfer_id]
        link = self._links.pop(transfer_id)
        handoff.machine.to(HandoffState.ABORTED)
        self.counts["aborted"] += 1
        forgotten = self.landing.quarantine(transfer_id)
        link.send(aborted=handoff_pb2.Aborted(transfer_id=transfer_id, error=error.to_wire()))
        # A rank may be scattering one of its parts: until it says otherwise, the blocks are not free.
        return self._free(handoff, forgotten)

    async def _free(self, handoff: IncomingHandoff, forgotten: Sequence[asyncio.Future[None]]) -> None:
        await self.landing.answered(forgotten)
        await self._engine.abort(handoff.spec.transfer_id, handoff.verified_tokens)

    async def abort(self, transfer_id: bytes) -> HandoffState:
        """The arbiter's answer for an attempt that is not decoding yet. A commit under way says first how it ends."""
        handoff = self._live.get(transfer_id)
        if handoff is not None and await handoff.ends_committed():
            return HandoffState.COMMITTED
        await self._abort(transfer_id, errors.CancelledError("aborted by the router"))
        return HandoffState.ABORTED

    # --- the worker's life -------------------------------------------------------------------------------

    async def rejoin(self, worker: common_pb2.WorkerRef) -> None:
        """Take a new epoch after a fence. Hand-offs under way end; every slot that is not free is in doubt."""
        self.worker = worker
        for link in list(self._peers.values()):
            link.end()
        for transfer_id in list(self._live):
            await self._abort(transfer_id, errors.StaleEpochError("this worker was fenced"))
        for ring in self.rings:
            ring.fence_all()
        for rank in self._ranks:
            rank.handle(m.NewEpoch(worker.epoch))

    async def process_exited(self, peer: str) -> None:
        """Handle the proof that the process of `peer` (worker_id@epoch) has exited: its writes end with one more poll."""
        for link in self.links:
            if link.name == peer:
                self.peer_lost(link)
        await asyncio.sleep(0)  # its hand-offs' slots are in quarantine now
        await self.landing.process_exited(peer)

    @property
    def links(self) -> set[PeerLink]:
        return {*self._peers.values(), *self._links.values()}

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def rate_bytes_per_second(self) -> float:
        return self._rate

    def check_integrity(self) -> None:
        self.landing.check_integrity()

    async def close(self) -> None:
        for transfer_id in list(self._live):
            await self._abort(transfer_id, errors.UnavailableError("the decode worker stops"))
        for link in list(self._peers.values()):
            link.end()
        self.landing.close()
        for rank in self._ranks:
            await asyncio.to_thread(rank.close)
