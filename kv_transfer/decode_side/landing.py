"""The landing rings of all ranks, and what it takes before memory is used again.

What is in doubt stays out of use until a proof has come (Drained, or the peer's process has exited) and the rank has
polled its endpoint for a moment since: over TCP a dead writer's last bytes lie in the socket until then.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence

from cluster import errors
from cluster.config.worker import TransferConfig
from kv_transfer import messages as m
from kv_transfer.decode_side.incoming import IncomingHandoff
from kv_transfer.decode_side.ring import Ring, Slot, SlotState, worker_of
from kv_transfer.decode_side.turns import Claim
from kv_transfer.ranks import ReceivingRank
from wire import handoff_pb2

log = logging.getLogger(__name__)
ANSWER_SECONDS = 5.0  # a rank answers between two parts: one that does not is stuck, or dead
MOST_PART_SECONDS = 30.0  # for one part: where a peer trickled, the measured rate would allow hours
EXHAUSTED_SECONDS = 30.0  # doubt that lasts: a cancelled hand-off is out of doubt within milliseconds


class Landing:
    """`granted(rank, claim, slot)` is told of every grant; `grown()` when peers must learn of new memory;
    `exhausted(reason)` when too much has been in doubt for too long and the ring may not grow."""

    def __init__(
        self,
        ranks: Sequence[ReceivingRank],
        addresses: Sequence[Sequence[int]],
        config: TransferConfig,
        *,
        granted: Callable[[int, Claim, Slot], None],
        grown: Callable[[], None],
        exhausted: Callable[[str], None],
    ):
        self._ranks = ranks
        self._config = config
        self._granted = granted
        self._grown = grown
        self._exhausted = exhausted
        self._loop = asyncio.get_running_loop()
        self._metadata = {index: rank.hello.metadata for index, rank in enumerate(ranks)}
        self._timers: dict[tuple[int, int, int], asyncio.TimerHandle] = {}
        self._growing: set[int] = set()
        self._doubt: dict[int, asyncio.TimerHandle] = {}
        self._answers: dict[tuple[int, bytes], asyncio.Future[None]] = {}
        self.exhausted_seconds = EXHAUSTED_SECONDS
        self.rings = [Ring(list(a), self._grantor(index)) for index, a in enumerate(addresses)]

    def _grantor(self, rank: int) -> Callable[[Claim, Slot], None]:
        return lambda claim, slot: self._granted(rank, claim, slot)

    @property
    def digest_kinds(self) -> tuple[str, ...]:
        """Digest kinds that every rank can verify, the fastest first."""
        first, *others = (rank.hello.digest_kinds for rank in self._ranks)
        return tuple(kind for kind in first if all(kind in other for other in others))

    def device(self, rank: int) -> int:
        return self._ranks[rank].hello.device

    def endpoints(self) -> list[handoff_pb2.RankEndpoint]:
        return [
            handoff_pb2.RankEndpoint(
                rank=index,
                agent_name=rank.hello.agent_name,
                agent_metadata=self._metadata[index],
                memory=rank.hello.memory,
            )
            for index, rank in enumerate(self._ranks)
        ]

    # --- transfers and grants ----------------------------------------------------------------------------

    def expect_transfer(self, handoff: IncomingHandoff, digests: str, digest_kind: str) -> None:
        """Tell each rank into which blocks the hand-off's parts go."""
        for index, rank in enumerate(self._ranks):
            rank.handle(
                m.ExpectTransfer(
                    transfer_id=handoff.spec.transfer_id,
                    prefill_epoch=handoff.prefill_epoch,
                    block_ids=handoff.reservation.block_ids,
                    held_tokens=handoff.reservation.held_tokens,
                    token_count=handoff.spec.token_count,
                    flows=[flow for flow in handoff.flows if flow.target_rank == index],
                    digests=digests,
                    digest_kind=digest_kind,
                )
            )

    def forget(self, transfer_id: bytes) -> None:
        """Tell the ranks that no part of the transfer can land any more."""
        for rank in self._ranks:
            rank.handle(m.ForgetTransfer(transfer_id, confirm=False))

    def expect(
        self, claim: Claim, slot: Slot, rank: int, seconds: float, expired: Callable[[Slot], None]
    ) -> None:
        """Expect a part in a slot that was granted; calls `expired(slot)` if nothing lands within `seconds`, or
        MOST_PART_SECONDS."""
        self._ranks[rank].handle(
            m.Expect(slot.index, slot.generation, claim.transfer_id, claim.part, claim.source_rank)
        )
        key = (rank, slot.index, slot.generation)

        def too_late() -> None:
            self._timers.pop(key, None)
            late = self.rings[rank].slot(slot.index, key[2])
            if late is not None and late.machine.state is SlotState.GRANTED:
                expired(late)

        self._timers[key] = self._loop.call_later(min(seconds, MOST_PART_SECONDS), too_late)

    def landed(self, part: m.PartLanded) -> Slot | None:
        """The part's slot; None if it is in doubt by now, or another's: then the part is dropped."""
        timer = self._timers.pop((part.rank, part.slot, part.generation), None)
        if timer is not None:
            timer.cancel()
        slot = self.rings[part.rank].slot(part.slot, part.generation)
        return slot if slot is not None and slot.machine.state is SlotState.GRANTED else None

    # --- doubt -------------------------------------------------------------------------------------------

    def quarantine(self, transfer_id: bytes) -> list[asyncio.Future[None]]:
        """At once: the transfer's slots are in doubt. Done when its ranks have forgotten it: none of them reads
        from those slots, nor writes into its blocks, any more."""
        forgotten = []
        for rank, ring in enumerate(self.rings):
            if ring.quarantine(transfer_id):
                forgotten.append(self._ask(rank, transfer_id, m.ForgetTransfer(transfer_id)))
            else:
                self._ranks[rank].handle(m.ForgetTransfer(transfer_id, confirm=False))
            self._consider(rank)
        return forgotten

    async def drained(self, transfer_id: bytes, worker_id: str) -> None:
        """Free the transfer's slots in doubt: its prefill worker reports that all its writes are terminal.

        Does nothing if the transfer is another worker's.
        """

        def proven(claim: Claim) -> bool:
            return claim.transfer_id == transfer_id and worker_of(claim.peer) == worker_id

        for rank, ring in enumerate(self.rings):
            if ring.in_doubt(proven):
                await self._settle(rank)
                ring.fence_proven(proven)
                self._consider(rank)

    async def process_exited(self, peer: str) -> None:
        """Proof: the peer's process has exited, as reported by its parent. `peer` is worker_id@epoch."""
        for rank, ring in enumerate(self.rings):
            if ring.in_doubt(lambda claim: claim.peer == peer):
                await self._settle(rank)
                ring.fence_proven(lambda claim: claim.peer == peer)
                self._consider(rank)

    async def _settle(self, rank: int) -> None:
        token = secrets.token_bytes(8)
        await self.answered([self._ask(rank, token, m.Settle(token))])

    def _ask(self, rank: int, token: bytes, message: m.ForgetTransfer | m.Settle) -> asyncio.Future[None]:
        future = self._answers.get((rank, token))
        if future is None:
            future = self._answers[rank, token] = self._loop.create_future()
            self._ranks[rank].handle(message)
        return future

    async def answered(self, waiting: Sequence[asyncio.Future[None]]) -> None:
        """Raises InternalError, and gives the worker up, if a rank does not answer."""
        if not waiting:
            return
        _, missing = await asyncio.wait(waiting, timeout=ANSWER_SECONDS)
        if missing:
            reason = f"a rank has not answered for {ANSWER_SECONDS:.0f} s"
            self._exhausted(reason)
            raise errors.InternalError(reason)

    def confirmed(self, event: m.Confirmed) -> None:
        future = self._answers.pop((event.rank, event.token), None)
        if future is not None and not future.done():
            future.set_result(None)

    # --- growth ------------------------------------------------------------------------------------------

    def _consider(self, rank: int) -> None:
        """A quarter in doubt: a further segment at new addresses, up to the cap; there, the end, if it lasts."""
        timer = self._doubt.pop(rank, None)
        if not self._too_much_doubt(rank):
            if timer is not None:
                timer.cancel()
            return
        total = len(self.rings[rank].slots)
        room = self._config.ring_max_bytes // self._config.slot_bytes - total
        if room > 0:
            if rank not in self._growing:
                self._growing.add(rank)
                self._ranks[rank].handle(m.AddSegment(min(room, max(1, total // 2))))
            return
        self._doubt[rank] = timer or self._loop.call_later(self.exhausted_seconds, self._give_up, rank)

    def _too_much_doubt(self, rank: int) -> bool:
        ring = self.rings[rank]
        return ring.count(SlotState.QUARANTINED) * 4 >= len(ring.slots)

    def _give_up(self, rank: int) -> None:
        self._doubt.pop(rank, None)
        if self._too_much_doubt(rank):
            doubtful, total = self.rings[rank].count(SlotState.QUARANTINED), len(self.rings[rank].slots)
            self._exhausted(
                f"{doubtful} of {total} landing slots of rank {rank} have been in doubt for "
                f"{self.exhausted_seconds:.0f} s, and the ring may not grow beyond ring_max_bytes"
            )

    def segment_added(self, event: m.SegmentAdded) -> None:
        self._growing.discard(event.rank)
        self._metadata[event.rank] = event.metadata
        self._grown()  # before the first grant in it: a peer writes only where its metadata says there is memory
        self.rings[event.rank].add_segment(list(event.addresses))

    def check_integrity(self) -> None:
        for ring in self.rings:
            ring.check_integrity()

    def close(self) -> None:
        for timer in (*self._timers.values(), *self._doubt.values()):
            timer.cancel()
