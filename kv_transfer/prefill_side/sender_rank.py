"""One rank's end at the prefill worker: notes computed layers and posts the writes of their parts.

engine thread:  layer_computed ──note──► jobs
our thread:     parts ─(slots asked)─► granted ─┬─ in large pieces: as they lie in the cache ────┬─► written ─► verified
                                                └─ else gathered into staging, free when verified ┘

Slots are asked for many parts ahead, and staging is taken only for parts that have one: so the two sides meet once a
part (its result and a further grant travel together), and a peer that grants nothing holds nothing of ours.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from cluster.config.worker import TransferConfig
from cluster.errors import TransportError
from cluster.faults.points import NO_FAULTS, Act, Faults, Point
from kv_transfer import messages as m
from kv_transfer.layout.digest import digest, kinds_on
from kv_transfer.layout.geometry import gather, pieces, wait_copied
from kv_transfer.memory import Staging
from kv_transfer.poll_pace import PollPace
from kv_transfer.prefill_side.outgoing import Cutting, Job, Part, Transfer, part_header
from kv_transfer.prefill_side.pair_digests import PairDigests
from kv_transfer.prefill_side.rank_peers import RankPeers
from kv_transfer.transports.base import Endpoint

log = logging.getLogger(__name__)

IDLE_POLL_SECONDS = 0.25
PROBE_SECONDS = 3.0
MAX_PARTS_AHEAD = 32  # of one hand-off: asked for, and not yet verified
MIN_PIECE_BYTES = 64 << 10  # shorter ones are faster copied together first than written one by one


class SenderRank:
    """Also the engine's ExportSink on this rank."""

    is_remote = False

    def __init__(
        self,
        *,
        rank: int,
        kv_cache: Tensor,
        kv_head_range: tuple[int, int],
        endpoint: Endpoint | None,
        config: TransferConfig,
        faults: Faults = NO_FAULTS,
    ):
        self.rank = rank
        self.on_event: Callable[[Any], None] = lambda event: None
        self._cache = kv_cache
        self._heads = kv_head_range
        self._endpoint = endpoint
        self._staging = Staging(max(config.staging_bytes, 2 * config.slot_bytes), kv_cache.device)
        if endpoint is not None:
            endpoint.register(self._staging.buffer)
            if kv_cache.device.type == "cpu":
                endpoint.register(kv_cache)
        self._digests = PairDigests(kv_cache.device, config)
        self._at_granted = faults.point(Point.SENDER_GRANTED)
        self._at_written = faults.point(Point.SENDER_WRITTEN)
        self._transfers: dict[bytes, Transfer] = {}
        self._by_request: dict[str, Transfer] = {}
        self._peers = RankPeers(endpoint, self._writes_to)
        self._probing_until = 0.0
        self._pace = PollPace(time.monotonic())
        self._inbox: deque[Any] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._cutting = Cutting(
            num_layers=kv_cache.shape[1],
            page_size=kv_cache.shape[4],
            token_bytes=kv_cache.shape[5] * kv_cache.element_size(),
            part_bytes=config.part_bytes,
            max_part_bytes=self._staging.size // 2,
        )
        self._thread = threading.Thread(target=self._run, name=f"sender-{rank}", daemon=True)
        self._thread.start()

    def start(self, on_event: Callable[[m.FromSender], None]) -> None:
        self.on_event = on_event

    @property
    def hello(self) -> m.PeerRank:
        """Without metadata: we write to peers, and the keys to our own memory are for nobody."""
        name = "" if self._endpoint is None else self._endpoint.name
        return m.PeerRank(self.rank, name, b"", digest_kinds=kinds_on(self._cache.device))

    @property
    def staging_used_bytes(self) -> int:
        return self._staging.size - self._staging.free_bytes

    # --- engine thread -----------------------------------------------------------------------------------

    def layer_computed(
        self, request_id: str, layer: int, token_begin: int, token_end: int, block_ids: Sequence[int]
    ) -> None:
        """ExportSink. Notes the fact; wakes our thread once a step's worth of layers is worth a part."""
        transfer = self._by_request.get(request_id)
        if transfer is None or transfer.failed:
            return
        try:
            if transfer.note(layer, token_begin, token_end, block_ids):
                with self._wake:
                    self._wake.notify()
        except Exception as error:  # an engine outlives what one hand-off does to it
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
                self.on_event(m.TransferOpened(message.transfer_id, self.rank))
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(5.0)

    # --- our thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # of no single hand-off: `_fail` has seen to those
            log.exception("rank %d sends nothing any more", self.rank)
            self.on_event(m.RankFailed(self.rank, repr(error)))

    def _work(self) -> None:
        while not self._closing:
            worked = self._handle_inbox()
            for transfer in self._known():
                try:
                    worked |= self._advance(transfer)
                except Exception as error:  # this thread serves every hand-off
                    self._fail(transfer, error)
            worked |= self._peers.let_go()
            if worked:
                self._pace.happened(time.monotonic())
            else:
                self._pause()
        if self._endpoint is not None:
            self._endpoint.close()

    def _known(self) -> list[Transfer]:
        """In one go: `handle` adds to them meanwhile, on other threads."""
        return list(self._transfers.values())

    def _pause(self) -> None:
        now = time.monotonic()
        writing = any(transfer.writing for transfer in self._known())
        probing = now < self._probing_until
        if self._endpoint is not None and (probing or not writing):
            self._endpoint.notifications()  # drives progress for our peers
        pause = self._pace.pause(now) if writing else IDLE_POLL_SECONDS
        if probing:
            pause = min(pause, 1e-3)
        with self._wake:
            ready = self._inbox or self._closing or any(t.cuttable for t in self._known())
            if not ready:
                self._wake.wait(pause)

    def _handle_inbox(self) -> bool:
        worked = False
        while self._inbox:
            worked = True
            message = self._inbox.popleft()
            try:
                self._handle_one(message)
            except Exception as error:
                transfer = self._transfers.get(getattr(message, "transfer_id", b""))
                if transfer is None:
                    raise
                self._fail(transfer, error)
        return worked

    def _handle_one(self, message: Any) -> None:
        match message:
            case m.Connect():
                self._connect(message)
            case m.OpenTransfer():
                self._peers.mend(message.peer)
            case m.Disconnect():
                self._peers.link_lost(message.peer)
            case m.Granted():
                self._granted(message)
            case m.PartAnswered():
                self._answered(message)
            case m.CloseTransfer():
                self._close_transfer(message.transfer_id)

    def _fail(self, transfer: Transfer, error: Exception) -> None:
        """Mark a hand-off failed and report it once. Posted writes are polled until terminal; nothing more is posted."""
        if transfer.failed:
            return
        transfer.failed = True
        transfer_id = transfer.opened.transfer_id
        log.error("hand-off %s failed at rank %d", transfer_id.hex(), self.rank, exc_info=error)
        self.on_event(m.TransferFailed(transfer_id, f"{type(error).__name__}: {error}"))

    def _connect(self, message: m.Connect) -> None:
        try:
            self._peers.connect(message)
        except Exception as error:  # any failure here concerns this peer only
            self.on_event(m.ProbeFailed(message.peer, str(error)))
        if self._endpoint is not None:
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
            part.pieces = self._pieces(transfer.opened, part.job)
            self._want_slot(transfer, part)
        if transfer.all_cut and not transfer.announced:
            self._announce(transfer)
        return self._send_next(transfer) or worked

    def _send_next(self, transfer: Transfer) -> bool:
        """Gathers and posts one granted part; between two of them we look what has arrived."""
        for part in transfer.parts.values():
            if part.posted or part.grant is None or part.chunk is not None or part.write is not None:
                continue
            data = self._source(transfer, part)
            if data is not None:
                strike = self._at_granted(transfer.opened.transfer_id)
                if strike is None or strike.act is not Act.DROP:
                    self._post(transfer, part, part.grant, data)
                else:
                    part.posted = True  # it believes so, and nothing ever lands
                return True
        return False

    def _within_share(self, peer: str, size: int) -> bool:
        """Whether `size` more bytes of staging are within the peer's share: half of what the others leave, so that a
        peer that reads nothing cannot take all. Writes of its ended hand-offs count until they are terminal."""
        own = sum(transfer.staged_bytes for transfer in self._known() if transfer.opened.peer == peer)
        return not own or 2 * (own + size) <= self._staging.free_bytes + own

    def _source(self, transfer: Transfer, part: Part) -> list[Tensor] | None:
        """What is written; None while staging has no room."""
        opened = transfer.opened
        data = part.pieces or self._gather(opened.peer, part)
        if data is not None:
            wait_copied(self._cache)  # computed and gathered: NIXL knows nothing of CUDA's streams
            target = part.job.flow.target_rank
            part.digest_kind = self._digests.kind_of(opened, self.rank, target, part.index)
            part.digest = digest(data, part.digest_kind)
            for other in transfer.parts.values():  # the notification of the write before this one leaves now
                if other.write is not None:
                    other.write.poll()
        return data

    def _own_heads(self, job: Job) -> range:
        return range(job.flow.head_begin - self._heads[0], job.flow.head_end - self._heads[0])

    def _pieces(self, opened: m.OpenTransfer, job: Job) -> list[Tensor] | None:
        """The part's bytes in place, without a copy, if they lie in large pieces. The engine keeps the blocks until
        this rank reports TransferDrained, however the hand-off ends."""
        if opened.transport != "nixl":
            return None
        heads = self._own_heads(job)
        return pieces(self._cache, job.block_ids, job.layers, heads, job.tokens, MIN_PIECE_BYTES)

    def _gather(self, peer: str, part: Part) -> list[Tensor] | None:
        """A copy in staging."""
        job, cache = part.job, self._cache
        if not self._within_share(peer, job.bytes):
            return None
        part.chunk = self._staging.take(job.bytes)
        if part.chunk is None:
            return None
        data = self._staging.view(part.chunk, job.bytes)
        gather(cache, data.view(cache.dtype), job.block_ids, job.layers, self._own_heads(job), job.tokens)
        return [data]

    def _want_slot(self, transfer: Transfer, part: Part) -> None:
        target = part.job.flow.target_rank
        self.on_event(
            m.SlotWanted(transfer.opened.transfer_id, self.rank, target, part.index, part.job.bytes)
        )

    def _announce(self, transfer: Transfer) -> None:
        transfer.announced = True
        parts = tuple(transfer.counts.items())
        self.on_event(m.AllGathered(transfer.opened.transfer_id, self.rank, parts, transfer.bytes))

    def _granted(self, grant: m.Granted) -> None:
        transfer = self._transfers.get(grant.transfer_id)
        part = transfer.parts.get((grant.target_rank, grant.part)) if transfer else None
        if transfer is None or part is None or transfer.closing:
            return
        name = (grant.slot, grant.generation)
        if part.grant is not None or name in part.grants:
            return  # said twice, or late: by now the slot may be another's
        part.grants.add(name)
        part.grant, part.posted = grant, False

    def _post(self, transfer: Transfer, part: Part, grant: m.Granted, data: list[Tensor]) -> None:
        part.posted = True
        header = part_header(transfer.opened, part, grant).SerializeToString()
        opened = transfer.opened
        if opened.transport == "grpc" or self._endpoint is None:
            (whole,) = data
            self.on_event(m.PartBytes(opened.transfer_id, header, whole.cpu().numpy().tobytes()))
            self._at_written(opened.transfer_id)
            return
        try:
            peer = self._peers.rank(opened.peer, grant.target_rank)
            part.write = self._endpoint.write(
                peer.agent_name, data, grant.address, grant.device, header, peer.memory
            )
            self._at_written(opened.transfer_id)
        except TransportError as error:
            self.on_event(m.TransferFailed(opened.transfer_id, str(error)))

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
                    self.on_event(m.TransferFailed(transfer.opened.transfer_id, "the NIXL write failed"))
            if part.chunk is not None and (part.verified or not part.posted):
                # One that arrived corrupted is gathered anew: what waits for a slot must not keep staging from
                # what has one.
                self._give_back(part)
                worked = True
            if part.verified:
                del transfer.parts[key]
                worked = True
        return worked

    def _answered(self, answer: m.PartAnswered) -> None:
        transfer = self._transfers.get(answer.transfer_id)
        part = transfer.parts.get((answer.target_rank, answer.part)) if transfer else None
        if transfer is None or part is None or transfer.closing:
            return
        if not answer.verified:
            part.grant, part.posted = None, False
            self._want_slot(transfer, part)
            return
        part.verified = True
        self._poll_writes(transfer)  # the bytes have left; the handle may need one more poll to know

    def _close_transfer(self, transfer_id: bytes) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:  # never opened here, and closed before it could be
            self.on_event(m.TransferDrained(transfer_id, self.rank))
            return
        transfer.closing = True
        self._by_request.pop(transfer.opened.request_id, None)

    def _finish_closing(self, transfer: Transfer) -> bool:
        """Says Drained once no write is pending: an error counts as terminal, never as "did not land"."""
        if transfer.writing:
            return False
        for part in transfer.parts.values():
            self._give_back(part)
        del self._transfers[transfer.opened.transfer_id]
        self.on_event(m.TransferDrained(transfer.opened.transfer_id, self.rank))
        return True

    def _give_back(self, part: Part) -> None:
        if part.chunk is not None:
            self._staging.give_back(part.chunk)
            part.chunk = None
