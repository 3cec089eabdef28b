"""The landing rings of all ranks, and the conditions under which memory is used again.

A slot in doubt is not granted again until there is a proof (Drained, or the peer's process has exited) and the rank has
polled its endpoints for a moment since: over TCP a dead writer's last bytes lie in the socket until then.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster import errors
from cluster.config.worker import TransferConfig
from kv_transfer import messages as m
from kv_transfer.decode_side.ring import IncomingPart, Ring, Slot, SlotState, worker_of
from kv_transfer.memory import most_slots
from kv_transfer.ranks import ReceivingRank
from wire import handoff_pb2

log = logging.getLogger(__name__)
ANSWER_SECONDS = 5.0  # a rank answers between two parts, unless it is stuck or dead
MAX_PART_SECONDS = 30.0  # for one part: after a slow peer the measured rate would allow hours
EXHAUSTED_SECONDS = 30.0  # the doubt about a cancelled hand-off ends within milliseconds


class Landing:
    """Calls `granted(rank, part, slot)` for every grant, `grown()` before a slot in new memory is granted, and
    `exhausted(reason)` when too many slots have been in doubt for too long and the ring may not grow."""

    def __init__(
        self,
        ranks: Sequence[ReceivingRank],
        addresses: Sequence[Sequence[int]],
        config: TransferConfig,
        *,
        granted: Callable[[int, IncomingPart, Slot], None],
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
        self.rings = [Ring(list(a), self._grantor(index)) for index, a in enumerate(addresses)]

    def _grantor(self, rank: int) -> Callable[[IncomingPart, Slot], None]:
        return lambda part, slot: self._granted(rank, part, slot)

    @property
    def hellos(self) -> list[m.PeerRank]:
        return [rank.hello for rank in self._ranks]

    @property
    def digest_kinds(self) -> tuple[str, ...]:
        """Digest kinds that every rank can verify, the fastest first."""
        first, *others = (hello.digest_kinds for hello in self.hellos)
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

    def expect_transfer(self, message: m.ExpectTransfer) -> None:
        """Tell each rank into which blocks its share of the hand-off's parts goes."""
        for index, rank in enumerate(self._ranks):
            own = [flow for flow in message.flows if flow.target_rank == index]
            rank.handle(replace(message, flows=own))

    def forget(self, transfer_id: bytes) -> None:
        """Tell the ranks that no part of the transfer can land any more."""
        for rank in self._ranks:
            rank.handle(m.ForgetTransfer(transfer_id, confirm=False))

    def expect(self, grant: handoff_pb2.SlotGrant, seconds: float, expired: Callable[[Slot], None]) -> None:
        """Expect the part of a grant; `expired(slot)` is called if it does not land within `seconds`, or
        MAX_PART_SECONDS."""
        rank = grant.target_rank
        self._ranks[rank].handle(grant)
        key = (rank, grant.slot, grant.generation)

        def too_late() -> None:
            self._timers.pop(key, None)
            late = self.rings[rank].slot(grant.slot, grant.generation)
            if late is not None and late.machine.state is SlotState.GRANTED:
                expired(late)

        self._timers[key] = self._loop.call_later(min(seconds, MAX_PART_SECONDS), too_late)

    def landed(self, part: m.PartLanded) -> Slot | None:
        """The part's slot; None if it is in doubt by now, or granted again: then the part is dropped."""
        timer = self._timers.pop((part.rank, part.slot, part.generation), None)
        if timer is not None:
            timer.cancel()
        slot = self.rings[part.rank].slot(part.slot, part.generation)
        return slot if slot is not None and slot.machine.state is SlotState.GRANTED else None

    # --- doubt -------------------------------------------------------------------------------------------

    def quarantine(self, transfer_id: bytes) -> list[asyncio.Future[None]]:
        """Put the transfer's slots in doubt, at once. The futures are done when its ranks have forgotten it, and neither
        read from those slots nor write into its blocks any more."""
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

        def proven(part: IncomingPart) -> bool:
            return part.transfer_id == transfer_id and worker_of(part.peer) == worker_id

        for rank, ring in enumerate(self.rings):
            if ring.in_doubt(proven):
                await self._settle(rank)
                ring.fence_proven(proven)
                self._consider(rank)

    async def process_exited(self, peer: str) -> None:
        """Free the slots in doubt of a peer (worker_id@epoch) whose process has provably exited."""
        for rank, ring in enumerate(self.rings):
            if ring.in_doubt(lambda part: part.peer == peer):
                await self._settle(rank)
                ring.fence_proven(lambda part: part.peer == peer)
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
        """Wait for ranks. If one does not answer, this worker is exhausted: raises InternalError."""
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
        """With a quarter of the ring in doubt, add a segment at new addresses, up to the cap; at the cap the worker is
        exhausted if the doubt lasts."""
        timer = self._doubt.pop(rank, None)
        if not self._too_much_doubt(rank):
            if timer is not None:
                timer.cancel()
            return
        total = len(self.rings[rank].slots)
        room = most_slots(self._config) - total
        if room > 0:
            if rank not in self._growing:
                self._growing.add(rank)
                self._ranks[rank].handle(m.AddSegment(min(room, max(1, total // 2))))
            return
        self._doubt[rank] = timer or self._loop.call_later(EXHAUSTED_SECONDS, self._give_up, rank)

    def _too_much_doubt(self, rank: int) -> bool:
        ring = self.rings[rank]
        return ring.count(SlotState.QUARANTINED) * 4 >= len(ring.slots)

    def _give_up(self, rank: int) -> None:
        self._doubt.pop(rank, None)
        if self._too_much_doubt(rank):
            doubtful, total = self.rings[rank].count(SlotState.QUARANTINED), len(self.rings[rank].slots)
            self._exhausted(
                f"{doubtful} of {total} landing slots of rank {rank} have been in doubt for "
                f"{EXHAUSTED_SECONDS:.0f} s, and the ring may not grow beyond ring_max_bytes"
            )

    def segment_added(self, event: m.SegmentAdded) -> None:
        self._growing.discard(event.rank)
        self._metadata[event.rank] = event.metadata
        self._grown()  # before the first grant in it: peers write only into memory that their metadata names
        self.rings[event.rank].add_segment(list(event.addresses))

    def check_integrity(self) -> None:
        for ring in self.rings:
            ring.check_integrity()

    def close(self) -> None:
        for timer in (*self._timers.values(), *self._doubt.values()):
            timer.cancel()
