"""The prefill worker's side of hand-offs: any number of them over one link per decode worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from cluster import errors
from cluster.config.worker import TransferConfig
from cluster.faults.points import NO_FAULTS, Faults
from cluster.security.tls import Peers
from kv_transfer import messages as m
from kv_transfer.prefill_side.handoff import OutgoingHandoff
from kv_transfer.prefill_side.link import ANSWER_SECONDS, LinkToDecode
from kv_transfer.prefill_side.links import Links
from kv_transfer.prefill_side.stats import SenderStats
from kv_transfer.ranks import SendingRank, on_event_loop
from wire import common_pb2, handoff_pb2

ABORT_SECONDS = 2.0  # how long a closing sender waits for pending writes


class HandoffSender:
    """All hand-offs of one prefill worker."""

    def __init__(
        self,
        *,
        worker: common_pb2.WorkerRef,
        layout: common_pb2.KvLayout,
        ranks: Sequence[SendingRank],
        config: TransferConfig,
        peers: Peers | None = None,
        faults: Faults = NO_FAULTS,
        on_failed: Callable[[str], None] = lambda reason: None,
    ):
        """`peers` opens the control streams; default: plain text. `on_failed` is called when a rank has failed."""
        self.links = Links(
            worker=worker, layout=layout, ranks=ranks, config=config, peers=peers or Peers(), faults=faults
        )
        self.stats = SenderStats()
        self._ranks = ranks
        self._config = config
        self._on_failed = on_failed
        self._live: dict[bytes, OutgoingHandoff] = {}
        from_rank = on_event_loop(self._dispatch)
        for rank in ranks:
            rank.start(from_rank)

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def staging_bytes(self) -> int:
        return max(self._config.staging_bytes, 2 * self._config.slot_bytes)

    @property
    def staging_used_bytes(self) -> int:
        """Of the ranks in this process."""
        return sum(rank.staging_used_bytes for rank in self._ranks)

    async def reserve(
        self, decode: common_pb2.WorkerRef, reserve: handoff_pb2.Reserve, deadline_seconds: float
    ) -> OutgoingHandoff:
        """Reserve the hand-off's blocks at the decode worker. Raises BlocksExhaustedError, LayoutMismatchError,
        StaleEpochError, PeerLostError, DeadlineError, …; then nothing is held anywhere."""
        try:
            async with asyncio.timeout(deadline_seconds):
                link = await self.links.open(decode)
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
            ranks=self._ranks,
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
        self.links.drained(handoff.link, handoff.transfer_id)

    def _dispatch(self, event: m.FromSender) -> None:
        match event:
            case m.ProbeFailed():
                if (link := self.links[event.peer]) is not None:
                    link.probe_failed(event.reason)
                return
            case m.RankFailed():
                self._on_failed(f"rank {event.rank} sends no more parts: {event.reason}")
                return
            case handoff_pb2.PartData():
                transfer_id = event.header.transfer_id
            case _:
                transfer_id = event.transfer_id
        if (handoff := self._live.get(transfer_id)) is not None:
            handoff.on_rank_event(event)

    async def rejoin(self, worker: common_pb2.WorkerRef) -> None:
        """Continue under a new epoch after this worker was fenced: hand-offs end, and are drained over new links."""
        for handoff in list(self._live.values()):
            await handoff.abort("this worker was fenced")
        await self.links.rejoin(worker)

    async def close(self) -> None:
        for handoff in list(self._live.values()):
            await handoff.abort("the prefill worker stops")
        deadline = time.monotonic() + ABORT_SECONDS
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for handoff in self._live.values():
            handoff.stop_draining()
        await self.links.close()
        for rank in self._ranks:
            await asyncio.to_thread(rank.close)
