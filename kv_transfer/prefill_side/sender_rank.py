"""One rank's end at the prefill worker: notes computed layers and posts the writes of their parts.

engine thread:  layer_computed ──note──► jobs
own thread:     parts ─(slots asked)─► granted ─┬─ in large pieces: as they lie in the cache ────┬─► written ─► verified
                                                └─ else gathered into staging, free when verified ┘

Blocks and staging stay in use until the device has read them: TransferDrained waits for reads as it does for writes.

Slots are requested for many parts ahead, so that a part's result and a further grant travel together. Staging is
allocated only for parts that have a slot, so that a peer that grants nothing uses none of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from cluster.config.worker import TransferConfig
from cluster.errors import TransportError
from cluster.faults.points import NO_FAULTS, Act, Faults, Point
from kv_transfer import messages as m
from kv_transfer.device.base import ReadPart
from kv_transfer.device.registry import OpenCopier, open_copier
from kv_transfer.memory import largest_part
from kv_transfer.prefill_side.part_source import PartSource
from kv_transfer.prefill_side.rank_peers import RankPeers
from kv_transfer.prefill_side.rank_transfer import Cutting, Part, Transfer, part_header
from kv_transfer.rank_thread import PollPace, RankThread
from kv_transfer.transports.base import PROBE_SECONDS
from kv_transfer.transports.registry import TRANSPORTS, Endpoints
from wire import handoff_pb2

log = logging.getLogger(__name__)

IDLE_POLL_SECONDS = 0.25
MAX_PARTS_AHEAD = 32  # of one hand-off: requested, and not yet verified


class SenderRank:
    """Also the engine's ExportSink on this rank."""

    is_remote = False

    def __init__(
        self,
        *,
        rank: int,
        kv_cache: Tensor,
        kv_head_range: tuple[int, int],
        endpoints: Endpoints,
        config: TransferConfig,
        faults: Faults = NO_FAULTS,
        make_copier: OpenCopier = open_copier,
    ):
        self.rank = rank
        self._endpoints = endpoints
        self._copier = make_copier(kv_cache, largest_part(config))
        self._source = PartSource(kv_cache, kv_head_range[0], self._copier, endpoints, config)
        self._at_granted = faults.point(Point.SENDER_GRANTED)
        self._at_written = faults.point(Point.SENDER_WRITTEN)
        self._transfers: dict[bytes, Transfer] = {}
        self._by_request: dict[str, Transfer] = {}
        self._peers = RankPeers(endpoints, self._writes_to)
        self._probing_until = 0.0
        self._pace = PollPace(time.monotonic())
        self._cutting = Cutting(
            num_layers=kv_cache.shape[1],
            page_size=kv_cache.shape[4],
            token_bytes=kv_cache.shape[5] * kv_cache.element_size(),
            part_bytes=config.part_bytes,
            max_part_bytes=largest_part(config),
        )
        self._thread: RankThread[m.ToSender] = RankThread(f"sender-{rank}", self._run)

    def start(self, on_event: Callable[[m.FromSender], None]) -> None:
        self._on_event = on_event
        self._thread.start()

    @property
    def hello(self) -> m.PeerRank:
        """Without metadata: peers do not write to this rank."""
        return replace(self._endpoints.hello(self.rank, self._copier), metadata=b"")

    @property
    def staging_used_bytes(self) -> int:
        return self._source.used_bytes

    # --- engine thread -----------------------------------------------------------------------------------

    def layer_computed(
        self, request_id: str, layer: int, token_begin: int, token_end: int, block_ids: Sequence[int]
    ) -> None:
        """Note a layer that is enqueued in this thread's stream; wakes this rank's thread once there is enough for a
        part."""
        transfer = self._by_request.get(request_id)
        if transfer is None or transfer.failed:
            return
        try:
            if transfer.note(layer, token_begin, token_end, block_ids, self._copier.mark):
                self._thread.notify()
        except Exception as error:  # a failed hand-off must not end the engine
            self._fail(transfer, error)

    # --- any thread --------------------------------------------------------------------------------------

    def handle(self, message: m.ToSender) -> None:
        if isinstance(message, m.OpenTransfer):
            # At once, before the engine can compute a layer of it.
            transfer = Transfer(message, self._cutting)
            self._transfers[message.transfer_id] = transfer
            if message.flows:
                self._by_request[message.request_id] = transfer
            if message.acknowledge:
                self._on_event(m.TransferOpened(message.transfer_id, self.rank))
        self._thread.put(message)

    def close(self) -> None:
        self._thread.close()

    # --- own thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._copier.use_thread()
            self._work()
        except Exception as error:  # a failure of one hand-off does not get here: see `_fail`
            log.exception("the sending thread of rank %d failed: it sends no more parts", self.rank)
            self._on_event(m.RankFailed(self.rank, repr(error)))

    def _work(self) -> None:
        while not self._thread.closing:
            worked = self._handle_inbox()
            for transfer in self._known():
                try:
                    worked |= self._advance(transfer)
                except Exception as error:  # this thread serves every hand-off
                    self._fail(transfer, error)
            worked |= self._peers.disconnect_lost()
            if worked:
                self._pace.progressed(time.monotonic())
            else:
                self._pause()
        self._endpoints.close()

    def _known(self) -> list[Transfer]:
        """A copy, because `handle` adds transfers on other threads."""
        return list(self._transfers.values())

    def _pause(self) -> None:
        now = time.monotonic()
        writing = any(transfer.writing for transfer in self._known())
        waiting = writing or any(transfer.waits_for_device for transfer in self._known())
        probing = now < self._probing_until
        if probing or not writing:
            self._endpoints.arrivals()  # drives progress for the peers
        pause = self._pace.pause(now) if waiting else IDLE_POLL_SECONDS
        if probing:
            pause = min(pause, 1e-3)
        self._thread.wait(pause, lambda: any(transfer.cuttable for transfer in self._known()))

    def _handle_inbox(self) -> bool:
        worked = False
        while (message := self._thread.next()) is not None:
            worked = True
            try:
                self._handle_one(message)
            except Exception as error:
                transfer = self._transfers.get(getattr(message, "transfer_id", b""))
                if transfer is None:
                    raise
                self._fail(transfer, error)
        return worked

    def _handle_one(self, message: m.ToSender) -> None:
        match message:
            case m.Connect():
                self._connect(message)
            case m.OpenTransfer():
                self._peers.mend(message.peer)
            case m.Disconnect():
                self._peers.link_lost(message.peer)
            case handoff_pb2.SlotGrant():
                self._granted(message)
            case handoff_pb2.PartResult():
                self._answered(message)
            case m.CloseTransfer():
                self._close_transfer(message.transfer_id)

    def _fail(self, transfer: Transfer, error: Exception) -> None:
        """Mark a hand-off as failed, and report it once. Its posted writes are polled until they are terminal."""
        if transfer.failed:
            return
        transfer.failed = True
        transfer_id = transfer.opened.transfer_id
        log.error("hand-off %s failed at rank %d", transfer_id.hex(), self.rank, exc_info=error)
        self._on_event(m.TransferFailed(transfer_id, f"{type(error).__name__}: {error}"))

    def _connect(self, message: m.Connect) -> None:
        try:
            self._peers.connect(message)
        except Exception as error:  # of this peer only
            self._on_event(m.ProbeFailed(message.peer, str(error)))
        if TRANSPORTS[message.transport].is_probed:
            self._probing_until = time.monotonic() + PROBE_SECONDS

    def _writes_to(self, peer: str) -> bool:
        return any(t.writing for t in self._known() if t.opened.peer == peer)

    def _advance(self, transfer: Transfer) -> bool:
        worked = self._poll_writes(transfer)
        if transfer.closing:
            return self._finish_closing(transfer) or worked
        if transfer.failed:
            return worked
        worked |= transfer.cut()
        for part in transfer.ask(MAX_PARTS_AHEAD):
            if self._endpoints[transfer.opened.transport].writes_in_place:
                part.pieces = self._source.in_place(part.job)
            self._request_slot(transfer, part)
        if transfer.all_cut and not transfer.announced:
            self._announce(transfer)
        return self._send_next(transfer) or worked

    def _send_next(self, transfer: Transfer) -> bool:
        """Begin to read what is granted, and post one part that has been read; messages and writes are looked at before
        the next one."""
        began = False
        for part in transfer.parts.values():
            if part.posted or part.grant is None or part.write is not None:
                continue
            if part.reading is None:
                if part.chunk is None:  # else of an earlier grant, and not free yet
                    part.reading = self._source.read(transfer.opened, part, self._staged_bytes)
                if part.reading is None:
                    continue
                began = True
            if (read := part.reading.result()) is not None:
                part.reading = None
                try:
                    self._send(transfer, part, part.grant, read)
                finally:
                    read.release()  # a transport that reads main memory has copied it
                return True
        return began

    def _send(self, transfer: Transfer, part: Part, grant: handoff_pb2.SlotGrant, read: ReadPart) -> None:
        for other in transfer.parts.values():  # the notification of the write before this one leaves now
            if other.write is not None:
                other.write.poll()
        part.digest = read.digest
        fault = self._at_granted(transfer.opened.transfer_id)
        if fault is None or fault.act is not Act.DROP:
            self._post(transfer, part, grant, read.pieces)
        else:
            part.posted = True  # as if written, and nothing lands

    def _staged_bytes(self, peer: str) -> int:
        return sum(transfer.staged_bytes for transfer in self._known() if transfer.opened.peer == peer)

    def _request_slot(self, transfer: Transfer, part: Part) -> None:
        self._on_event(
            handoff_pb2.SlotRequest(
                transfer_id=transfer.opened.transfer_id,
                source_rank=self.rank,
                target_rank=part.job.flow.target_rank,
                part=part.index,
                bytes=part.job.bytes,
            )
        )

    def _announce(self, transfer: Transfer) -> None:
        transfer.announced = True
        parts = tuple(transfer.counts.items())
        self._on_event(m.AllGathered(transfer.opened.transfer_id, self.rank, parts, transfer.bytes))

    def _granted(self, grant: handoff_pb2.SlotGrant) -> None:
        transfer = self._transfers.get(grant.transfer_id)
        part = transfer.parts.get((grant.target_rank, grant.part)) if transfer else None
        if transfer is None or part is None or transfer.closing:
            return
        name = (grant.slot, grant.generation)
        if part.grant is not None or name in part.grants:
            return  # repeated or late: the slot may have another owner by now
        part.grants.add(name)
        part.grant, part.posted = grant, False

    def _post(
        self, transfer: Transfer, part: Part, grant: handoff_pb2.SlotGrant, data: Sequence[Tensor]
    ) -> None:
        part.posted = True
        opened = transfer.opened
        header = part_header(opened, part, grant).SerializeToString()
        try:
            peer = self._peers.rank(opened.peer, grant.target_rank)
            part.write = self._endpoints[opened.transport].write(
                peer.agent_name, data, grant.address, grant.device, header, peer.memory
            )
        except TransportError as error:
            self._on_event(m.TransferFailed(opened.transfer_id, str(error)))
            return
        for carried in self._endpoints.outgoing():
            self._on_event(carried)
        self._at_written(opened.transfer_id)

    def _poll_writes(self, transfer: Transfer) -> bool:
        """Staging is free again once the part is verified and its handle terminal."""
        worked = False
        for key, part in list(transfer.parts.items()):
            state = part.write.poll() if part.write is not None else "done"
            if state == "pending":
                continue
            if part.write is not None:
                worked = True
                part.write = None
                if state == "error" and not transfer.closing:
                    label = TRANSPORTS[transfer.opened.transport].label
                    self._on_event(m.TransferFailed(transfer.opened.transfer_id, f"the {label} write failed"))
            if part.chunk is not None and part.reading is None and (part.verified or not part.posted):
                # A corrupted part is gathered again: one that waits for a slot must not keep staging from those
                # that have one.
                self._source.free(part)
                worked = True
            if part.verified:
                del transfer.parts[key]
                worked = True
        return worked

    def _answered(self, answer: handoff_pb2.PartResult) -> None:
        transfer = self._transfers.get(answer.transfer_id)
        part = transfer.parts.get((answer.target_rank, answer.part)) if transfer else None
        if transfer is None or part is None or transfer.closing:
            return
        if not answer.verified:
            part.grant, part.posted = None, False
            self._request_slot(transfer, part)
            return
        part.verified = True
        self._poll_writes(transfer)  # the handle may need one more poll to become terminal

    def _close_transfer(self, transfer_id: bytes) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:  # closed before it was opened here
            self._on_event(m.TransferDrained(transfer_id, self.rank))
            return
        transfer.closing = True
        self._by_request.pop(transfer.opened.request_id, None)

    def _finish_closing(self, transfer: Transfer) -> bool:
        """Report TransferDrained once no write and no read is pending. An error counts as terminal, never as "did not
        land"."""
        if transfer.writing or transfer.reading:
            return False
        for part in transfer.parts.values():
            if part.reading is not None and (read := part.reading.result()) is not None:
                read.release()
            self._source.free(part)
        del self._transfers[transfer.opened.transfer_id]
        self._on_event(m.TransferDrained(transfer.opened.transfer_id, self.rank))
        return True
