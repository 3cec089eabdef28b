"""The decode worker's side of hand-offs: reserves, grants slots, collects parts, commits. D alone decides."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from cluster import errors
from cluster.block_hash import HASH_BYTES
from cluster.config import TransferConfig
from kv_transfer import messages as m
from kv_transfer.base import DecodeEngine, HandoffSpec, HandoffState
from kv_transfer.geometry import plan_flows
from kv_transfer.incoming import IncomingHandoff
from kv_transfer.peer import PeerLink
from kv_transfer.ranks import Rank
from kv_transfer.ring import Claim, Ring, Slot, SlotState
from wire import common_pb2, handoff_pb2

log = logging.getLogger(__name__)
ASSUMED_RATE = 500e6  # bytes per second, before the first part was measured
COMMIT_WAIT_SECONDS = 10.0


class HandoffReceiver:
    def __init__(
        self,
        *,
        worker: common_pb2.WorkerRef,
        layout: common_pb2.KvLayout,
        ranks: Sequence[Rank],
        addresses: Sequence[Sequence[int]],
        engine: DecodeEngine,
        config: TransferConfig,
        is_ended: Callable[[bytes], bool],
    ):
        """`addresses[rank]` are those of the rank's first segment of slots. `is_ended` says which transfer
        ids are over at this worker."""
        self.worker = worker
        self.layout = layout
        self.config = config
        self._ranks = ranks
        self._engine = engine
        self._is_ended = is_ended
        self._loop = asyncio.get_running_loop()
        self._live: dict[bytes, IncomingHandoff] = {}
        self._links: dict[bytes, PeerLink] = {}  # of live hand-offs
        self._peers: dict[str, PeerLink] = {}
        self._grant_timers: dict[tuple[int, int, int], asyncio.TimerHandle] = {}
        self._rate = ASSUMED_RATE
        self.counts: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.rings = [Ring(list(a), self._grantor(rank)) for rank, a in enumerate(addresses)]
        for rank in ranks:
            rank.on_event = self._from_rank

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

    def endpoints(self) -> list[handoff_pb2.RankEndpoint]:
        hellos = [rank.hello for rank in self._ranks]
        return [
            handoff_pb2.RankEndpoint(rank=h.rank, agent_name=h.agent_name, agent_metadata=h.metadata)
            for h in hellos
        ]

    def register(self, link: PeerLink) -> None:
        self._peers[link.name] = link

    # --- what the peer asks ------------------------------------------------------------------------------

    async def reserve(self, link: PeerLink, request: handoff_pb2.Reserve) -> None:
        reply = handoff_pb2.ReserveReply(transfer_id=request.transfer_id)
        known = self._live.get(request.transfer_id)
        if known is not None:  # asked again: the first answer again
            reply.held_tokens = known.reservation.held_tokens
            link.send(reserve_reply=reply)
            return
        try:
            handoff = await self._reserve(link, request)
        except errors.BatonError as error:
            self.counts["refused"] += 1
            reply.refused.CopyFrom(error.to_wire())
        else:
            reply.held_tokens = handoff.reservation.held_tokens
        link.send(reserve_reply=reply)

    async def _reserve(self, link: PeerLink, request: handoff_pb2.Reserve) -> IncomingHandoff:
        transfer_id = request.transfer_id
        if self._is_ended(transfer_id):
            raise errors.StaleTransferError(f"attempt {transfer_id.hex()} has ended", field="transfer_id")
        hashes = request.block_hashes
        spec = HandoffSpec(
            transfer_id,
            request.request_id,
            request.spec,
            request.token_count,
            [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)],
        )
        reservation = await self._engine.reserve(spec)
        handoff = IncomingHandoff(
            spec=spec,
            reservation=reservation,
            peer=link.name,
            prefill_epoch=link.prefill.epoch,
            flows=plan_flows(
                self.layout.num_kv_heads,
                link.layout.tensor_parallel,
                self.layout.tensor_parallel,
                transfer_id,
            ),
            num_layers=self.layout.num_layers,
        )
        self._live[transfer_id] = handoff
        self._links[transfer_id] = link
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
        if request.bytes > self.config.slot_bytes or request.target_rank >= len(self.rings):
            error = errors.TransportError(f"a part of {request.bytes} bytes fits no slot", field="slot_bytes")
            self._spawn(self._abort(request.transfer_id, error))
            return
        if handoff.machine.state is HandoffState.RESERVED:
            handoff.machine.to(HandoffState.RECEIVING)
        claim = Claim(request.transfer_id, link.name, request.source_rank, request.part, request.bytes)
        self.rings[request.target_rank].ask(claim)

    def _grantor(self, rank: int) -> Callable[[Claim, Slot], None]:
        def grant(claim: Claim, slot: Slot) -> None:
            self._grant(rank, claim, slot)

        return grant

    def _grant(self, rank: int, claim: Claim, slot: Slot) -> None:
        handoff = self._live.get(claim.transfer_id)
        link = self._links.get(claim.transfer_id)
        if handoff is None or link is None:
            # It ended between asking and now; nobody was told of the slot, so nobody writes to it.
            self._loop.call_soon(self.rings[rank].landed_wrong, slot)
            return
        self._ranks[rank].handle(
            m.Expect(
                slot=slot.index,
                generation=slot.generation,
                transfer_id=claim.transfer_id,
                part=claim.part,
                source_rank=claim.source_rank,
                prefill_epoch=handoff.prefill_epoch,
                block_ids=handoff.reservation.block_ids,
            )
        )
        seconds = claim.bytes / self._rate * 4 + 1.0
        key = (rank, slot.index, slot.generation)
        self._grant_timers[key] = self._loop.call_later(seconds + 1.0, self._grant_expired, key)
        if not handoff.first_part:
            handoff.first_part = time.monotonic()
        link.send(
            slot_grant=handoff_pb2.SlotGrant(
                transfer_id=claim.transfer_id,
                source_rank=claim.source_rank,
                target_rank=rank,
                part=claim.part,
                slot=slot.index,
                generation=slot.generation,
                address=slot.address,
                deadline_seconds=seconds,
            )
        )

    def _grant_expired(self, key: tuple[int, int, int]) -> None:
        self._grant_timers.pop(key, None)
        rank, index, generation = key
        slot = self.rings[rank].slot(index, generation)
        if slot is not None and slot.claim is not None and slot.machine.state is SlotState.GRANTED:
            self.counts["late_parts"] += 1
            error = errors.TransportError("a part did not land within its deadline")
            self._spawn(self._abort(slot.claim.transfer_id, error))

    async def finish(self, link: PeerLink, finish: handoff_pb2.Finish) -> None:
        handoff = self._live.get(finish.transfer_id)
        if handoff is None or self._links.get(finish.transfer_id) is not link:
            self.counts["stale"] += 1
            error = errors.StaleTransferError("the hand-off has ended", field="transfer_id")
            link.send(aborted=handoff_pb2.Aborted(transfer_id=finish.transfer_id, error=error.to_wire()))
            return
        if handoff.finish is None:
            handoff.finish = finish
            handoff.finish_received = time.monotonic()
        await self._commit_if_complete(handoff)

    def drained(self, link: PeerLink, transfer_id: bytes) -> None:
        for ring in self.rings:
            ring.drained(transfer_id)

    async def abort_by_peer(self, link: PeerLink, message: handoff_pb2.AbortHandoff) -> None:
        if self._links.get(message.transfer_id) is link:
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
            case m.PartLanded():
                self._landed(event)
            case m.ProbeArrived():
                owner = event.nonce.rsplit(":", 1)[0]
                for link in self._peers.values():
                    if link.prefill.worker_id == owner:
                        link.send(probe_result=handoff_pb2.ProbeResult(arrived=True))
            case m.SegmentAdded():
                self.rings[event.rank].add_segment(list(event.addresses))

    def _landed(self, part: m.PartLanded) -> None:
        timer = self._grant_timers.pop((part.rank, part.slot, part.generation), None)
        if timer is not None:
            timer.cancel()
        ring = self.rings[part.rank]
        slot = ring.slot(part.slot, part.generation)
        if slot is None or slot.machine.state is not SlotState.GRANTED:
            self.counts["stale"] += 1  # its hand-off ended meanwhile: the quarantine rules decide
            return
        handoff = self._live.get(part.transfer_id)
        link = self._links.get(part.transfer_id)
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
        self._answer(link, part, True)
        self._spawn(self._commit_if_complete(handoff))

    def _part_failed(self, handoff: IncomingHandoff, link: PeerLink, part: m.PartLanded) -> None:
        """A corrupted part is sent once more; twice, or one that does not fit, ends the attempt."""
        self.counts[f"part_{part.error}"] += 1
        key = (part.source_rank, part.rank, part.part)
        if part.error == "digest" and key not in handoff.resent:
            handoff.resent.add(key)
            self._answer(link, part, False)
            return
        error = errors.DigestMismatchError(f"part {part.part} arrived corrupted twice ({part.error})")
        self._spawn(self._abort(part.transfer_id, error))

    @staticmethod
    def _answer(link: PeerLink, part: m.PartLanded, verified: bool) -> None:
        link.send(
            part_result=handoff_pb2.PartResult(
                transfer_id=part.transfer_id,
                source_rank=part.source_rank,
                target_rank=part.rank,
                part=part.part,
                verified=verified,
            )
        )

    # --- the end of a hand-off ---------------------------------------------------------------------------

    async def _commit_if_complete(self, handoff: IncomingHandoff) -> None:
        transfer_id = handoff.spec.transfer_id
        finish = handoff.finish
        if not handoff.complete or handoff.committing or self._live.get(transfer_id) is not handoff:
            return
        assert finish is not None, "complete says so"
        if not handoff.covered:
            error = errors.TransportError("Finish names fewer parts than the tokens need")
            await self._abort(transfer_id, error)
            return
        handoff.committing = True
        exposed = max(0.0, (handoff.last_part or handoff.finish_received) - handoff.finish_received)
        try:
            await self._engine.commit(transfer_id, finish.first_tokens, finish.report)
        except errors.BatonError as error:
            handoff.committing = False
            await self._abort(transfer_id, error)
            return
        handoff.machine.to(HandoffState.COMMITTED)
        self.counts["committed"] += 1
        if handoff.bytes and handoff.last_part > handoff.first_part:
            measured = handoff.bytes / (handoff.last_part - handoff.first_part)
            self._rate += 0.2 * (measured - self._rate)
        del self._live[transfer_id]
        link = self._links.pop(transfer_id)
        link.send(committed=handoff_pb2.Committed(transfer_id=transfer_id, exposed_seconds=exposed))

    async def _abort(self, transfer_id: bytes, error: errors.BatonError) -> None:
        handoff = self._live.get(transfer_id)
        if handoff is None or handoff.committing:
            return
        del self._live[transfer_id]
        link = self._links.pop(transfer_id)
        handoff.machine.to(HandoffState.ABORTED)
        self.counts["aborted"] += 1
        for rank, ring in enumerate(self.rings):
            for slot in ring.quarantine(transfer_id):
                self._ranks[rank].handle(m.Forget(slot.index, slot.generation))
            self._grow_if_quarantined(rank)
        link.send(aborted=handoff_pb2.Aborted(transfer_id=transfer_id, error=error.to_wire()))
        await self._engine.abort(transfer_id, handoff.verified_tokens)

    def _grow_if_quarantined(self, rank: int) -> None:
        """A quarter in doubt: a further segment at new addresses, up to the cap."""
        ring = self.rings[rank]
        total = len(ring.slots)
        if ring.count(SlotState.QUARANTINED) * 4 < total:
            return
        room = self.config.ring_max_bytes // self.config.slot_bytes - total
        if room > 0:
            self._ranks[rank].handle(m.AddSegment(min(room, max(1, total // 2))))

    async def abort(self, transfer_id: bytes) -> HandoffState:
        """The arbiter's answer for an attempt that is not decoding yet."""
        deadline = time.monotonic() + COMMIT_WAIT_SECONDS
        while (handoff := self._live.get(transfer_id)) is not None and handoff.committing:
            if time.monotonic() > deadline:
                raise errors.InternalError("a commit takes too long to say how it ends")
            await asyncio.sleep(0.002)
        if handoff is None:
            return HandoffState.ABORTED
        await self._abort(transfer_id, errors.CancelledError("aborted by the router"))
        return HandoffState.ABORTED

    # --- the worker's life -------------------------------------------------------------------------------

    def process_exited(self, peer: str) -> None:
        """The word of the peer's parent: nothing it posted can land any more. `peer` is worker_id@epoch."""
        for ring in self.rings:
            ring.process_exited(peer)

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def rate_bytes_per_second(self) -> float:
        return self._rate

    def check_integrity(self) -> None:
        for ring in self.rings:
            ring.check_integrity()

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a hand-off's follow-up failed", exc_info=task.exception())

    async def close(self) -> None:
        for transfer_id in list(self._live):
            await self._abort(transfer_id, errors.UnavailableError("the decode worker stops"))
        for link in list(self._peers.values()):
            link.end()
        for timer in self._grant_timers.values():
            timer.cancel()
        for rank in self._ranks:
            await asyncio.to_thread(rank.close)
