"""One hand-off at the prefill worker's leader: from the reservation to the commit, or its abort."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cluster import errors
from cluster.protocol.times import HANDOFF_STALL_SECONDS
from kv_transfer import messages as m
from kv_transfer.contract import HandoffReport
from kv_transfer.layout.geometry import plan_flows
from kv_transfer.prefill_side.check_replies import check_ranks
from kv_transfer.prefill_side.link import LinkToDecode
from kv_transfer.prefill_side.stats import SenderStats
from kv_transfer.ranks import SendingRank
from kv_transfer.transports.registry import TRANSPORTS
from wire import common_pb2, handoff_pb2

R = TypeVar("R")
PartKey = tuple[int, int, int]  # source rank, target rank, number
MAX_REQUESTS = 2  # of slots for one part: the decode worker may find it corrupted once
MAX_ANSWERS = 2 * MAX_REQUESTS  # to them, that count as progress: a grant and a result each
MAX_PARTS = 256  # of one hand-off: a trace does not need thousands


@dataclass
class PartTime:
    """Monotonic seconds; 0 = not yet."""

    target_rank: int
    part: int
    bytes: int
    asked: float
    granted: float = 0.0
    verified: float = 0.0


class PartTimes:
    """Times at which the parts of a traced hand-off were requested, granted and verified."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int, int], PartTime] = {}
        self.unnamed = 0  # beyond MAX_PARTS

    def asked(self, source_rank: int, target_rank: int, part: int, size: int) -> None:
        key = (source_rank, target_rank, part)
        if key in self._parts:  # sent again
            return
        if len(self._parts) >= MAX_PARTS:
            self.unnamed += 1
            return
        self._parts[key] = PartTime(target_rank, part, size, time.monotonic())

    def granted(self, source_rank: int, target_rank: int, part: int) -> None:
        known = self._parts.get((source_rank, target_rank, part))
        if known is not None:
            known.granted = time.monotonic()

    def verified(self, source_rank: int, target_rank: int, part: int) -> None:
        known = self._parts.get((source_rank, target_rank, part))
        if known is not None:
            known.verified = time.monotonic()

    def __iter__(self) -> Iterator[PartTime]:
        return iter(self._parts.values())


@dataclass
class PartRequests:
    """Requests of slots for one part."""

    asked: int = 0
    answered: int = 0


class PerRank(Generic[R]):
    """One report from each of `ranks`; `all_here` is done when the last one has come."""

    def __init__(self, ranks: Sequence[int]):
        self.by_rank: dict[int, R] = {}
        self.all_here: asyncio.Future[None] = _future()
        self._missing = set(ranks)

    def add(self, rank: int, report: R) -> bool:
        """Returns whether every rank has reported."""
        self.by_rank[rank] = report
        self._missing.discard(rank)
        if not self._missing and not self.all_here.done():
            self.all_here.set_result(None)
        return not self._missing


def _future() -> asyncio.Future[None]:
    """A future whose failure need not be read."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


@dataclass(eq=False)
class OutgoingHandoff:
    """Made by HandoffSender.reserve; ends with `finish` or `abort`, once."""

    reserve: handoff_pb2.Reserve = field(repr=False)  # has the prompt
    held_tokens: int
    link: LinkToDecode
    ranks: Sequence[SendingRank]
    stats: SenderStats
    on_drained: Callable[[OutgoingHandoff], None]  # called once no write of it is pending on any rank

    def __post_init__(self) -> None:
        self._part_times: PartTimes | None = None
        every = range(len(self.ranks))
        # A rank in this process has opened the hand-off when `handle` returns. To others the engine's plan takes another
        # way than this message and may overtake it: their first layers would be computed unnoticed.
        remote = [index for index in every if self.ranks[index].is_remote]
        self._opened: PerRank[m.TransferOpened] = PerRank(remote)
        self._gathered: PerRank[m.AllGathered] = PerRank(every)
        self._drained: PerRank[m.TransferDrained] = PerRank(every)
        self._committed: asyncio.Future[None] = _future()
        self._commit_seconds = 0.0
        self._closed = False
        self._progressed = 0.0
        self._requests: dict[PartKey, PartRequests] = {}

    @property
    def transfer_id(self) -> bytes:
        return self.reserve.transfer_id

    async def start(self, request_id: str, part_times: PartTimes | None = None) -> None:
        """Send every layer that the engine computes for `request_id` from now on. Await it before the engine gets the
        request. Raises HandoffError; then call `abort`."""
        self._part_times = part_times
        hello, agreed = self.link.hello, self.link.agreement
        layout = hello.layout
        flows = plan_flows(
            layout.num_kv_heads, layout.tensor_parallel, agreed.layout.tensor_parallel, self.transfer_id
        )
        for index, rank in enumerate(self.ranks):
            rank.handle(
                m.OpenTransfer(
                    transfer_id=self.transfer_id,
                    request_id=request_id,
                    peer=self.link.key,
                    transport=agreed.transport,
                    flows=[flow for flow in flows if flow.source_rank == index],
                    held_tokens=self.held_tokens,
                    token_count=self.reserve.token_count,
                    slot_bytes=min(agreed.slot_bytes, TRANSPORTS[agreed.transport].best_part_bytes),
                    prefill_epoch=hello.prefill.epoch,
                    decode_epoch=self.link.decode.epoch,
                    acknowledge=rank.is_remote,
                    digests=agreed.digests,
                    digest_kind=agreed.digest_kind,
                )
            )
        if any(rank.is_remote for rank in self.ranks):
            self._progressed = time.monotonic()
            await self._as_it_progresses(self._opened.all_here)

    async def finish(
        self, first_tokens: Sequence[common_pb2.Token], report: common_pb2.WorkReport
    ) -> HandoffReport:
        """Wait until the decode worker has every part and has committed. Raises HandoffError; then call `abort`."""
        prefill_ended = self._progressed = time.monotonic()
        await self._as_it_progresses(self._gathered.all_here)
        gathered = self._gathered.by_rank.items()
        flows = [
            handoff_pb2.FlowParts(source_rank=rank, target_rank=target, parts=parts)
            for rank, one in gathered
            for target, parts in one.parts
        ]
        finish = handoff_pb2.Finish(
            transfer_id=self.transfer_id, first_tokens=first_tokens, flows=flows, report=report
        )
        self.link.send(handoff_pb2.PrefillToDecode(finish=finish))
        await self._as_it_progresses(self._committed)
        self._close()
        shipped = sum(one.bytes for _, one in gathered)
        # After its commit the request waits in the decode worker's queue.
        exposed = max(0.0, time.monotonic() - prefill_ended - self._commit_seconds)
        transport = self.link.agreement.transport
        self.stats.handed_over(transport, shipped, exposed)
        return HandoffReport(self.held_tokens, shipped, sum(flow.parts for flow in flows), transport, exposed)

    async def _as_it_progresses(self, future: asyncio.Future[None]) -> None:
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
        await asyncio.shield(self._drained.all_here)

    def stop_draining(self) -> None:
        """End `drained`: this process ends, and its blocks go to no other request."""
        self._drained.all_here.cancel()

    async def abort(self, reason: str, *, discard: bool = False) -> None:
        """Stop posting and abort at the decode worker, which gets Drained once every write is terminal. `discard`: the KV
        may be wrong, and the decode worker keeps none of it."""
        if self._closed:
            return
        abort = handoff_pb2.AbortHandoff(transfer_id=self.transfer_id, reason=reason[:200], discard=discard)
        self.link.send(handoff_pb2.PrefillToDecode(abort=abort))
        self._close()

    def _close(self) -> None:
        self._closed = True
        for rank in self.ranks:
            rank.handle(m.CloseTransfer(self.transfer_id))

    def fail(self, error: errors.BatonError) -> None:
        for future in (self._opened.all_here, self._gathered.all_here, self._committed):
            if not future.done():
                future.set_exception(error)

    # --- events (on the event loop) ------------------------------------------------------------------------

    def on_rank_event(self, event: m.FromSender) -> None:
        match event:
            case handoff_pb2.SlotRequest():
                self._count_request(event)
                if self._part_times is not None:
                    self._part_times.asked(event.source_rank, event.target_rank, event.part, event.bytes)
                self.link.send(handoff_pb2.PrefillToDecode(slot_request=event))
            case handoff_pb2.PartData():
                self.link.send(handoff_pb2.PrefillToDecode(part=event))
            case m.TransferOpened():
                self._opened.add(event.source_rank, event)
            case m.AllGathered():
                self._gathered.add(event.source_rank, event)
            case m.TransferFailed():
                self.fail(errors.TransportError(event.reason))
            case m.TransferDrained():
                if self._drained.add(event.source_rank, event):
                    self.on_drained(self)

    def on_reply(self, reply: handoff_pb2.DecodeToPrefill) -> None:
        try:
            self._on_reply(reply)
        except errors.TransportError as error:  # an invalid reply ends its own hand-off only
            self.fail(error)

    def _on_reply(self, reply: handoff_pb2.DecodeToPrefill) -> None:
        match reply.WhichOneof("message"):
            case "slot_grant":
                grant = reply.slot_grant
                self._check(grant)
                if self._part_times is not None:
                    self._part_times.granted(grant.source_rank, grant.target_rank, grant.part)
                self.ranks[grant.source_rank].handle(grant)
            case "part_result":
                result = reply.part_result
                self._check(result)
                if self._part_times is not None and result.verified:
                    self._part_times.verified(result.source_rank, result.target_rank, result.part)
                self.stats.part_answered(result.verified)
                self.ranks[result.source_rank].handle(result)
            case "committed":
                if not self._committed.done():
                    said = reply.committed.commit_seconds
                    # Anything else would make this worker's own report false.
                    self._commit_seconds = said if 0.0 <= said < math.inf else 0.0
                    self._committed.set_result(None)
            case "aborted":
                self.fail(errors.from_wire(reply.aborted.error))

    def _count_request(self, request: handoff_pb2.SlotRequest) -> None:
        """A decode worker that finds a part corrupted again and again ends the hand-off."""
        requests = self._requests.setdefault(_key(request), PartRequests())
        requests.asked += 1
        if requests.asked > MAX_REQUESTS:
            self.fail(
                errors.TransportError(
                    f"{self.link.name} found part {request.part} of rank {request.source_rank} corrupted "
                    f"{MAX_REQUESTS} times",
                    field="verified",
                )
            )

    def _check(self, reply: handoff_pb2.SlotGrant | handoff_pb2.PartResult) -> None:
        """Only answers to requests are progress, and only so many: else one that is repeated would keep the hand-off, its
        blocks and its staging for ever."""
        check_ranks(reply, len(self.ranks), self.link.agreement.layout.tensor_parallel)
        requests = self._requests.get(_key(reply))
        if requests is not None and requests.answered < MAX_ANSWERS:
            requests.answered += 1
            self._progressed = time.monotonic()


def _key(one: handoff_pb2.SlotRequest | handoff_pb2.SlotGrant | handoff_pb2.PartResult) -> PartKey:
    return one.source_rank, one.target_rank, one.part
