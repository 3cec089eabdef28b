"""One rank's end at the decode worker: a ring of memory, and a thread that verifies and scatters arriving parts.

The leader accounts for the ring; this thread has only the expectations that the leader has sent. A notification that does
not match one is dropped and counted. On a device a part is verified and scattered by work that this thread enqueues and
polls; its slot and its blocks stay in use until that has ended.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from google.protobuf.message import DecodeError
from torch import Tensor

from cluster.config.worker import TransferConfig
from cluster.faults.points import NO_FAULTS, Act, Faults, Point
from kv_transfer import messages as m
from kv_transfer.decode_side.part_landing import (
    CacheShape,
    Expectations,
    LandingPart,
    PartLanding,
    SlotMemory,
)
from kv_transfer.device.registry import OpenCopier, open_copier
from kv_transfer.layout.conversion import Conversion
from kv_transfer.memory import first_slots
from kv_transfer.rank_thread import RankThread, pause_between
from kv_transfer.transports.base import Arrival
from kv_transfer.transports.registry import Endpoints
from wire import handoff_pb2

log = logging.getLogger(__name__)

# Polling: fast while a part is expected, at growing intervals when none arrives, rarely when none is expected.
FAST_POLL_SECONDS = 50e-6
SLOW_POLL_SECONDS = 2e-3
PAUSE_DIVISOR = 16
IDLE_POLL_SECONDS = 0.25  # an unpolled side completes nothing for its peer over TCP
LINGER_SECONDS = 1.0
# Far more than a socket's buffer takes. Both limits, because on a busy machine few polls fit into that time.
SETTLE_SECONDS = 0.02
SETTLE_POLLS = 20
PARTS_TOGETHER = 4  # in one report to the leader
REPORT_SECONDS = 0.0005  # longest wait of a report for further parts
EXPECTED = (m.ExpectTransfer, handoff_pb2.SlotGrant, m.ForgetTransfer)


def pause_of(quiet_seconds: float) -> float:
    """Pause between two polls while parts are expected, after `quiet_seconds` without an arrival.

    A part that takes T is noticed at most T / PAUSE_DIVISOR after its arrival; a part that never comes costs few polls.
    """
    return pause_between(quiet_seconds, FAST_POLL_SECONDS, SLOW_POLL_SECONDS, PAUSE_DIVISOR)


class Settling:
    """Settle requests: each is confirmed after SETTLE_SECONDS and SETTLE_POLLS, and once the parts that had arrived
    before have their outcome."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, int, int, bytes]] = deque()  # time, poll, part, token
        self._polls = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, token: bytes, arrived: int) -> None:
        """`arrived`: how many parts have arrived until now."""
        self._waiting.append((time.monotonic() + SETTLE_SECONDS, self._polls + SETTLE_POLLS, arrived, token))

    def polled(self) -> None:
        self._polls += 1

    def take(self, now: float, ended: int) -> bytes | None:
        """Remove and return the token of a request that is to be confirmed now, if there is one. `ended`: how many of the
        first parts that arrived have their outcome."""
        if not self._waiting:
            return None
        since, polls, arrived, token = self._waiting[0]
        if since > now or polls > self._polls or arrived > ended:
            return None
        self._waiting.popleft()
        return token


class ReceiverRank:
    is_remote = False
    staging_used_bytes = 0

    def __init__(
        self,
        *,
        rank: int,
        kv_cache: Tensor,
        kv_head_range: tuple[int, int],
        endpoints: Endpoints,
        config: TransferConfig,
        decode_epoch: int,
        faults: Faults = NO_FAULTS,
        conversion: Conversion | None = None,
        make_copier: OpenCopier | None = None,
    ):
        """`conversion`: of parts in another format than the cache's; None: they are in the cache's."""
        make_copier = make_copier or partial(open_copier, conversion=conversion)
        shape = CacheShape.of(kv_cache, kv_head_range[0], config.slot_bytes, conversion)
        self.rank = rank
        self._endpoints = endpoints
        self._copier = make_copier(kv_cache, config.slot_bytes)
        self._memory = SlotMemory(config.slot_bytes, self._copier, endpoints)
        self._expectations = Expectations(self._copier, config.digest_sample_share, decode_epoch)
        self._landing = PartLanding(
            rank=rank,
            copier=self._copier,
            shape=shape,
            memory=self._memory,
            poll=self._collect,
            at_landed=faults.point(Point.LANDING_LANDED),
        )
        self._at_scattered = faults.point(Point.LANDING_SCATTERED)
        self._settling = Settling()
        self._arrived: deque[Arrival] = deque()
        self._arrived_parts = 0
        self._landing_parts: deque[LandingPart] = deque()  # without an outcome, in the order of arrival
        self._forgetting: deque[bytes] = deque()  # transfers whose ForgetTransfer is to be confirmed
        self._unreported: list[m.PartLanded] = []
        self.dropped: Counter[str] = Counter()
        self.first_addresses = self._memory.add_segment(first_slots(config))
        self._thread: RankThread[m.ToReceiver] = RankThread(f"landing-{rank}", self._run)

    def start(self, on_event: Callable[[m.FromReceiver], None]) -> None:
        self._on_event = on_event
        self._thread.start()

    @property
    def hello(self) -> m.PeerRank:
        return self._endpoints.hello(self.rank, self._copier)

    def handle(self, message: m.ToReceiver) -> None:
        self._thread.put(message)

    def close(self) -> None:
        self._thread.close()

    # --- own thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._copier.use_thread()
            self._work()
        except Exception as error:  # no memory for a segment, NIXL; a part's own failure ends that part only
            log.exception("the landing thread of rank %d failed: it receives no more parts", self.rank)
            self._on_event(m.RankFailed(self.rank, repr(error)))

    def _work(self) -> None:
        last_useful = 0.0
        while not self._thread.closing:
            worked = self._handle_inbox()
            worked |= self._poll()
            now = time.monotonic()
            while (token := self._settling.take(now, self._ended_parts)) is not None:
                self._on_event(m.Confirmed(self.rank, token))
            if worked:
                last_useful = now
                continue
            if now - last_useful > REPORT_SECONDS:
                self._report()
            self._pause(now - last_useful)
        self._endpoints.close()

    def _pause(self, quiet_seconds: float) -> None:
        if self._settling or self._unreported:
            pause = FAST_POLL_SECONDS
        elif self._expectations or self._landing_parts:
            pause = pause_of(quiet_seconds)
        else:
            pause = SLOW_POLL_SECONDS if quiet_seconds < LINGER_SECONDS else IDLE_POLL_SECONDS
        self._thread.wait(pause)

    def _handle_inbox(self) -> bool:
        worked = False
        while (message := self._thread.next()) is not None:
            self._handle_one(message)
            worked = True
        return worked

    def _handle_one(self, message: m.ToReceiver) -> None:
        match message:
            case handoff_pb2.SlotGrant():
                self._expectations.expect(message)
            case m.ExpectTransfer():
                self._expectations.expect_transfer(message)
            case m.ForgetTransfer():
                self._forget(message)
            case m.Settle():
                self._settling.add(message.token, self._arrived_parts)
            case m.NewEpoch():
                self._expectations.new_epoch(message.epoch)
                self._give_up(lambda part: True)
            case handoff_pb2.PartData():
                self._endpoints.deliver(message)
            case m.AddSegment():
                addresses = self._memory.add_segment(message.slots)
                self._on_event(m.SegmentAdded(self.rank, addresses, self.hello.metadata))

    def _collect(self) -> None:
        self._arrived += self._endpoints.arrivals()

    def _poll(self) -> bool:
        self._settling.polled()
        self._collect()
        worked = bool(self._arrived)
        while self._arrived:
            arrival = self._arrived.popleft()
            if arrival.notification.startswith(m.PROBE_PREFIX):
                nonce = arrival.notification[len(m.PROBE_PREFIX) :].decode(errors="replace")
                self._on_event(m.ProbeArrived(self.rank, nonce))
            else:
                self._landed(arrival)
        return self._advance() or worked

    def _landed(self, arrival: Arrival) -> None:
        try:
            header = handoff_pb2.PartHeader.FromString(arrival.notification)
        except DecodeError:
            self.dropped["malformed"] += 1
            return
        # The grant may still be in the inbox: the peer can be faster than this thread's wake-up.
        while (message := self._thread.next(*EXPECTED)) is not None:
            self._handle_one(message)
        transfer = self._expectations.take(header)
        if transfer is None:
            self.dropped["stale"] += 1
            return
        self._arrived_parts += 1
        part = LandingPart(header, transfer, arrival.payload, self._arrived_parts)
        if self._landing.advance(part):
            self._ended(part)
        else:
            self._landing_parts.append(part)

    @property
    def _ended_parts(self) -> int:
        """How many of the first parts that arrived have their outcome."""
        return self._landing_parts[0].number - 1 if self._landing_parts else self._arrived_parts

    def _advance(self) -> bool:
        """Return whether a part got its outcome."""
        ended = [part for part in self._landing_parts if self._landing.advance(part)]
        for part in ended:
            self._landing_parts.remove(part)
            self._ended(part)
        while self._forgetting and not self._lands(self._forgetting[0]):
            self._confirm_forgotten(self._forgetting.popleft())
        return bool(ended)

    def _ended(self, part: LandingPart) -> None:
        header = part.header
        assert part.outcome is not None, "it has ended"
        landed = m.PartLanded(
            rank=self.rank,
            slot=header.slot,
            generation=header.generation,
            transfer_id=header.transfer_id,
            source_rank=header.source_rank,
            part=header.part,
            layers=(header.layer_begin, header.layer_end),
            tokens=(header.token_begin, header.token_end),
            bytes=header.bytes,
            error=part.outcome,
        )
        fault = self._at_scattered(header.transfer_id)
        self._unreported.append(landed)
        if fault is not None and fault.act is Act.TWICE:
            self._unreported.append(landed)
        self._report_some(header.transfer_id)

    def _report_some(self, transfer_id: bytes) -> None:
        """Report several parts together, unless the hand-off can send no more before the leader has this report."""
        failed = self._unreported[0].error
        if self._expectations.parts_of(transfer_id) < 2 or failed or len(self._unreported) >= PARTS_TOGETHER:
            self._report()

    def _report(self) -> None:
        if self._unreported:
            parts, self._unreported = tuple(self._unreported), []
            self._on_event(m.PartsLanded(parts))

    def _forget(self, message: m.ForgetTransfer) -> None:
        transfer_id = message.transfer_id
        self._expectations.forget(transfer_id)
        self._give_up(lambda part: part.header.transfer_id == transfer_id)
        if message.confirm and self._lands(transfer_id):
            self._forgetting.append(transfer_id)
        elif message.confirm:
            self._confirm_forgotten(transfer_id)
        else:
            self._report()

    def _lands(self, transfer_id: bytes) -> bool:
        """Whether a part of the hand-off has no outcome yet."""
        return any(part.header.transfer_id == transfer_id for part in self._landing_parts)

    def _give_up(self, gone: Callable[[LandingPart], bool]) -> None:
        for part in self._landing_parts:
            if gone(part):
                self._landing.give_up(part)

    def _confirm_forgotten(self, transfer_id: bytes) -> None:
        self._report()
        self._on_event(m.Confirmed(self.rank, transfer_id))
