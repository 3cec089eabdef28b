"""One rank's end at the decode worker: a ring of memory, and a thread that verifies and scatters what lands.

The leader keeps the ring's accounts; this thread knows only what it was told to expect in which slot. A
notification that does not match (generation, transfer, epoch) is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from cluster.config.worker import TransferConfig
from cluster.faults.points import NO_FAULTS, Act, Faults, Point, nothing
from kv_transfer import messages as m
from kv_transfer.decode_side.fitting import CacheShape, Place, check_slot_bytes
from kv_transfer.layout.digest import NONE, Digests, digest, kinds_on
from kv_transfer.layout.geometry import scatter, wait_copied
from kv_transfer.memory import aligned_bytes
from kv_transfer.poll_pace import pause_between
from kv_transfer.transports.base import Endpoint
from wire import handoff_pb2

log = logging.getLogger(__name__)

# Polling: fast while a part is expected, slower and slower when none comes, asleep when none is expected.
FAST_POLL_SECONDS = 50e-6
SLOW_POLL_SECONDS = 2e-3
PATIENCE = 16
IDLE_POLL_SECONDS = 0.25  # an unpolled side completes nothing for its peer over TCP
LINGER_SECONDS = 1.0
# Far more than a socket's buffer takes. Both: where the machine is busy, few polls fit into that time.
SETTLE_SECONDS = 0.02
SETTLE_POLLS = 20
PARTS_TOGETHER = 4  # reported to the leader
REPORT_SECONDS = 0.0005  # at most so long after the last of them, if no further one comes


def pause_of(quiet_seconds: float) -> float:
    """Pause between two polls while parts are expected, after `quiet_seconds` without an arrival.

    A part that takes T is noticed at most T / PATIENCE after its arrival; a part that never comes costs few polls.
    """
    return pause_between(quiet_seconds, FAST_POLL_SECONDS, SLOW_POLL_SECONDS, PATIENCE)


@dataclass(frozen=True)
class _Transfer:
    told: m.ExpectTransfer
    digests: Digests


@dataclass(frozen=True)
class RingMemory:
    """Where the slots of one segment lie."""

    memory: Tensor
    slots: int
    slot_bytes: int

    def address(self, slot: int) -> int:
        return self.memory.data_ptr() + slot * self.slot_bytes


class ReceiverRank:
    is_remote = False
    staging_used_bytes = 0

    def __init__(
        self,
        *,
        rank: int,
        kv_cache: Tensor,
        kv_head_range: tuple[int, int],
        endpoint: Endpoint | None,
        config: TransferConfig,
        decode_epoch: int,
        faults: Faults = NO_FAULTS,
    ):
        self.rank = rank
        self.on_event: Callable[[Any], None] = lambda event: None
        self._cache = kv_cache
        self._endpoint = endpoint
        self._slot_bytes = config.slot_bytes
        self._shape = CacheShape(
            num_layers=kv_cache.shape[1],
            page_size=kv_cache.shape[4],
            row_bytes=kv_cache.shape[5] * kv_cache.element_size(),
            first_head=kv_head_range[0],
            slot_bytes=config.slot_bytes,
        )
        least = 2 * kv_cache.shape[3] * self._shape.page_size * self._shape.row_bytes
        check_slot_bytes(config.slot_bytes, least)
        self._sample_share = config.digest_sample_share
        self._epoch = decode_epoch
        self._slots: list[Tensor] = []
        self._transfers: dict[bytes, _Transfer] = {}
        self._expected: dict[int, m.Expect] = {}  # by slot
        # Until when and until which poll, and what to confirm then.
        self._settling: deque[tuple[float, int, bytes]] = deque()
        self._polls = 0
        self._inbox: deque[Any] = deque()
        self._unreported: list[m.PartLanded] = []
        self._arrived: deque[bytes] = deque()  # notifications
        self._wake = threading.Condition()
        self._closing = False
        self.dropped: Counter[str] = Counter()
        self.before_verify: Callable[[Tensor], None] = nothing  # tests of one process break in here
        self._at_landed = faults.point(Point.LANDING_LANDED)
        self._at_scattered = faults.point(Point.LANDING_SCATTERED)
        self.first_addresses = self._add_segment(max(4, config.ring_bytes // config.slot_bytes))
        self._thread = threading.Thread(target=self._run, name=f"landing-{rank}", daemon=True)
        self._thread.start()

    def start(self, on_event: Callable[[m.FromReceiver], None]) -> None:
        self.on_event = on_event

    @property
    def hello(self) -> m.PeerRank:
        device, endpoint = self._cache.device, self._endpoint
        return m.PeerRank(
            rank=self.rank,
            agent_name="" if endpoint is None else endpoint.name,
            metadata=b"" if endpoint is None else endpoint.metadata,
            memory=m.DRAM if device.type == "cpu" else m.VRAM,
            device=device.index or 0,
            digest_kinds=kinds_on(device),
        )

    def handle(self, message: m.ToReceiver) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(5.0)

    def _add_segment(self, slots: int) -> list[int]:
        memory = aligned_bytes(slots * self._slot_bytes, self._cache.device)
        if self._endpoint is not None:
            self._endpoint.register(memory)
        segment = RingMemory(memory, slots, self._slot_bytes)
        self._slots += [memory[i * self._slot_bytes : (i + 1) * self._slot_bytes] for i in range(slots)]
        return [segment.address(slot) for slot in range(slots)]

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # no memory for a segment, NIXL: a part's own failures end that part only
            log.exception("rank %d lands nothing any more", self.rank)
            self.on_event(m.RankFailed(self.rank, repr(error)))

    def _work(self) -> None:
        last_useful = 0.0
        while not self._closing:
            worked = self._handle_inbox()
            worked |= self._poll()
            now = time.monotonic()
            while self._settling and self._settling[0][0] <= now and self._settling[0][1] <= self._polls:
                self.on_event(m.Confirmed(self.rank, self._settling.popleft()[2]))
            if worked:
                last_useful = now
                continue
            if now - last_useful > REPORT_SECONDS:
                self._report()
            self._pause(now - last_useful)
        if self._endpoint is not None:
            self._endpoint.close()

    def _pause(self, quiet_seconds: float) -> None:
        if self._settling or self._unreported:
            pause = FAST_POLL_SECONDS
        elif self._expected:
            pause = pause_of(quiet_seconds)
        else:
            pause = SLOW_POLL_SECONDS if quiet_seconds < LINGER_SECONDS else IDLE_POLL_SECONDS
        with self._wake:
            if not self._inbox and not self._closing:
                self._wake.wait(pause)

    def _handle_inbox(self) -> bool:
        worked = bool(self._inbox)
        while self._inbox:
            self._handle_one(self._inbox.popleft())
        return worked

    def _handle_one(self, message: Any) -> None:
        match message:
            case m.Expect():
                self._expected[message.slot] = message
            case m.ExpectTransfer():
                digests = Digests(
                    self._cache.device, message.digests, self._sample_share, message.digest_kind
                )
                self._transfers[message.transfer_id] = _Transfer(message, digests)
            case m.ForgetTransfer():
                self._forget(message)
            case m.Settle():
                until = time.monotonic() + SETTLE_SECONDS
                self._settling.append((until, self._polls + SETTLE_POLLS, message.token))
            case m.NewEpoch():
                self._epoch = message.epoch
                self._expected.clear()
                self._transfers.clear()
            case m.Land():
                self._land(message)
            case m.AddSegment():
                addresses = self._add_segment(message.slots)
                self.on_event(m.SegmentAdded(self.rank, addresses, self.hello.metadata))

    def _poll(self) -> bool:
        self._polls += 1
        if self._endpoint is None:
            return False
        self._arrived += self._endpoint.notifications()
        worked = bool(self._arrived)
        while self._arrived:
            message = self._arrived.popleft()
            if message.startswith(m.PROBE_PREFIX):
                self.on_event(
                    m.ProbeArrived(self.rank, message[len(m.PROBE_PREFIX) :].decode(errors="replace"))
                )
            else:
                self._part(message)
        return worked

    def _land(self, message: m.Land) -> None:
        self._landed(handoff_pb2.PartHeader.FromString(message.header), message.payload)

    def _part(self, raw: bytes) -> None:
        try:
            header = handoff_pb2.PartHeader.FromString(raw)
        except DecodeError:
            self.dropped["malformed"] += 1
            return
        self._landed(header)

    def _expectation(self, header: handoff_pb2.PartHeader) -> _Transfer | None:
        """The part's transfer, if slot, part, rank, generation and epochs are the ones expected; else None."""
        # The grant may still be in the inbox: the peer can be faster than our own wake-up.
        while self._inbox and isinstance(self._inbox[0], m.ExpectTransfer | m.Expect | m.ForgetTransfer):
            self._handle_one(self._inbox.popleft())
        expected = self._expected.get(header.slot)
        transfer = self._transfers.get(header.transfer_id)
        if (
            expected is None
            or transfer is None
            or expected.generation != header.generation
            or expected.transfer_id != header.transfer_id
            or transfer.told.prefill_epoch != header.prefill_epoch
            or self._epoch != header.decode_epoch
            or expected.part != header.part
            or expected.source_rank != header.source_rank
        ):
            return None
        return transfer

    def _landed(self, header: handoff_pb2.PartHeader, payload: bytes | None = None) -> None:
        """Process a part. `payload`: its bytes if they came on the gRPC stream and are not in the slot yet."""
        transfer = self._expectation(header)
        if transfer is None:
            self.dropped["stale"] += 1
            return
        del self._expected[header.slot]
        error = self._take(header, transfer, payload)
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
            error=error,
        )
        strike = self._at_scattered(header.transfer_id)
        self._unreported.append(landed)
        if strike is not None and strike.act is Act.TWICE:
            self._unreported.append(landed)
        self._report_some(header.transfer_id)

    def _report_some(self, transfer_id: bytes) -> None:
        """Some parts at a time, unless nothing more of this hand-off can come before the leader knows of them."""
        oldest = self._unreported[0]
        more = sum(expected.transfer_id == transfer_id for expected in self._expected.values())
        if more < 2 or oldest.error or len(self._unreported) >= PARTS_TOGETHER:
            self._report()

    def _report(self) -> None:
        if self._unreported:
            parts, self._unreported = tuple(self._unreported), []
            self.on_event(m.PartsLanded(parts))

    def _forget(self, message: m.ForgetTransfer) -> None:
        self._transfers.pop(message.transfer_id, None)
        for slot in [s for s, e in self._expected.items() if e.transfer_id == message.transfer_id]:
            del self._expected[slot]
        self._report()
        # We scatter on this thread only: nothing of it is running now.
        if message.confirm:
            self.on_event(m.Confirmed(self.rank, message.transfer_id))

    def _take(self, header: handoff_pb2.PartHeader, transfer: _Transfer, payload: bytes | None) -> str:
        """Verify and scatter a part; return "" or why that failed. Raises nothing: the thread serves all hand-offs."""
        try:
            place = self._shape.place(header, transfer.told, header.source_rank)
            if place is None or (payload is not None and not self._fill(header, payload)):
                return "geometry"
            strike = self._at_landed(header.transfer_id)
            if strike is not None and strike.act is Act.CORRUPT:
                self._slots[header.slot][0] ^= 0xFF
            data = self._slots[header.slot][: header.bytes]
            self.before_verify(data)
            if problem := self._unverified(header, transfer.digests, data):
                return problem
            self._scatter(data, place)
            return ""
        except Exception:
            log.exception(
                "part %d of hand-off %s could not be scattered", header.part, header.transfer_id.hex()
            )
            return "failed"

    def _fill(self, header: handoff_pb2.PartHeader, payload: bytes) -> bool:
        """A shorter one would leave the bytes of whoever had the slot before."""
        if not 0 < len(payload) == header.bytes <= self._slot_bytes:
            return False
        here = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._slots[header.slot][: len(payload)].copy_(here)
        return True

    def _unverified(self, header: handoff_pb2.PartHeader, digests: Digests, data: Tensor) -> str:
        """Check the digest; returns "" or why it fails. A digest that the pair did not agree on is checked too."""
        agreed = digests.kind_of(header.transfer_id, header.source_rank, self.rank, header.part)
        if header.digest_kind not in ((NONE, *kinds_on(data.device)) if agreed == NONE else (agreed,)):
            return "digest_missing"
        return "" if digest([data], header.digest_kind) == header.digest else "digest"

    def _scatter(self, data: Tensor, place: Place) -> None:
        cache = self._cache
        if self._endpoint is not None:
            # The write after this one is complete for our peer, and its notification on its way, only once we poll.
            self._arrived += self._endpoint.notifications()
        scatter(cache, data.view(cache.dtype), place.block_ids, place.layers, place.heads, place.tokens)
        wait_copied(cache)  # before the slot is somebody else's
