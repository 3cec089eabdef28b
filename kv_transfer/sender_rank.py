"""One rank's end at the prefill worker: notes computed layers, gathers them into staging, posts the writes.

engine thread:  layer_computed ──note──► jobs
our thread:     job ─gather─► staged part ─(slot granted)─► written ─(verified)─► staging is free again
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cluster.config import TransferConfig
from cluster.errors import TransportError
from kv_transfer import messages as m
from kv_transfer.digest import digest, kind_for
from kv_transfer.geometry import Flow, gather
from kv_transfer.memory import Chunk, Staging
from kv_transfer.receiver_rank import PROBE_PREFIX
from kv_transfer.transports.base import Endpoint, PendingWrite
from wire import handoff_pb2

log = logging.getLogger(__name__)

FAST_POLL_SECONDS = 30e-6
IDLE_POLL_SECONDS = 0.25
PROBE_SECONDS = 3.0


@dataclass(frozen=True)
class Job:
    """KV that is final: these layers of these tokens."""

    layers: range
    tokens: range
    block_ids: Sequence[int]  # of these tokens


@dataclass
class Part:
    """One staged part of one flow."""

    flow: Flow
    index: int
    job: Job
    chunk: Chunk
    size: int
    digest: bytes
    write: PendingWrite | None = None
    grant: m.Granted | None = None
    verified: bool = False


@dataclass
class Transfer:
    """What this rank knows of one hand-off."""

    opened: m.OpenTransfer
    # Written by the engine thread, read by ours (deque is safe for that).
    computed: deque[tuple[int, int, int, list[int]]] = field(default_factory=deque)
    seen_first: bool = False
    open_layers: list[int] = field(default_factory=list)  # of the current token range, not yet cut into a job
    open_tokens: tuple[int, int] = (0, 0)
    open_blocks: list[int] = field(default_factory=list)
    jobs: deque[tuple[Job, Flow]] = field(default_factory=deque)
    parts: dict[tuple[int, int], Part] = field(default_factory=dict)  # (target rank, index)
    counts: dict[int, int] = field(default_factory=dict)  # parts per target rank
    complete_tokens: int = 0
    announced: bool = False
    closing: bool = False
    bytes: int = 0


class SenderRank:
    """Also the engine's ExportSink on this rank."""

    def __init__(
        self,
        *,
        rank: int,
        kv_cache: Tensor,
        kv_head_range: tuple[int, int],
        endpoint: Endpoint | None,
        config: TransferConfig,
    ):
        self.rank = rank
        self.on_event: Callable[[Any], None] = lambda event: None
        self._cache = kv_cache
        self._heads = kv_head_range
        self._endpoint = endpoint
        self._config = config
        self._staging = Staging(max(config.staging_bytes, 2 * config.slot_bytes), kv_cache.device)
        if endpoint is not None:
            endpoint.register(self._staging.buffer)
        self._digest_kind = kind_for(kv_cache.device, config.digests == "all")
        self._transfers: dict[bytes, Transfer] = {}
        self._by_request: dict[str, Transfer] = {}
        self._peers: dict[str, dict[int, m.PeerRank]] = {}
        self._probing_until = 0.0
        self._inbox: deque[Any] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._page = kv_cache.shape[4]
        self._layers = kv_cache.shape[1]
        self._thread = threading.Thread(target=self._run, name=f"sender-{rank}", daemon=True)
        self._thread.start()

    @property
    def hello(self) -> m.PeerRank:
        if self._endpoint is None:
            return m.PeerRank(self.rank, "", b"")
        return m.PeerRank(self.rank, self._endpoint.name, self._endpoint.metadata)

    @property
    def staging_used_bytes(self) -> int:
        return self._staging.size - self._staging.free_bytes

    # --- engine thread -----------------------------------------------------------------------------------

    def layer_computed(
        self, request_id: str, layer: int, token_begin: int, token_end: int, block_ids: Sequence[int]
    ) -> None:
        """ExportSink. Notes the fact; wakes our thread once a step's worth of layers is worth a part."""
        transfer = self._by_request.get(request_id)
        if transfer is None:
            return
        blocks = list(block_ids[: -(-token_end // self._page)]) if layer == 0 else []
        transfer.computed.append((layer, token_begin, token_end, blocks))
        size = self._bytes(transfer.opened.flows, len(transfer.computed), token_end - token_begin)
        if layer == self._layers - 1 or size >= self._config.part_bytes:
            with self._wake:
                self._wake.notify()

    def _bytes(self, flows: Sequence[Flow], layers: int, tokens: int) -> int:
        heads = max((flow.head_end - flow.head_begin for flow in flows), default=0)
        return layers * 2 * heads * tokens * self._cache.shape[5] * self._cache.element_size()

    # --- any thread --------------------------------------------------------------------------------------

    def handle(self, message: Any) -> None:
        if isinstance(message, m.OpenTransfer):
            # At once, before the engine can compute a layer of it.
            transfer = Transfer(message)
            self._transfers[message.transfer_id] = transfer
            if message.flows:
                self._by_request[message.request_id] = transfer
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
        while not self._closing:
            worked = self._handle_inbox()
            for transfer in list(self._transfers.values()):
                worked |= self._advance(transfer)
            if not worked:
                self._pause()
        if self._endpoint is not None:
            self._endpoint.close()

    def _pause(self) -> None:
        writing = any(part.write for t in self._transfers.values() for part in t.parts.values())
        probing = time.monotonic() < self._probing_until
        if self._endpoint is not None and (probing or not writing):
            self._endpoint.notifications()  # drives progress for our peers
        pause = FAST_POLL_SECONDS if writing else 1e-3 if probing else IDLE_POLL_SECONDS
        with self._wake:
            ready = self._inbox or self._closing or any(self._cuttable(t) for t in self._transfers.values())
            if not ready:
                self._wake.wait(pause)

    def _cuttable(self, transfer: Transfer) -> bool:
        computed = transfer.computed
        return bool(computed) and not transfer.closing and computed[-1][0] == self._layers - 1

    def _handle_inbox(self) -> bool:
        worked = False
        while self._inbox:
            worked = True
            match self._inbox.popleft():
                case m.Connect() as message:
                    self._connect(message)
                case m.Disconnect() as message:
                    self._disconnect(message)
                case m.OpenTransfer() as message:
                    transfer = self._transfers.get(message.transfer_id)
                    if transfer is not None and not message.flows:
                        self._announce(transfer)
                case m.Granted() as message:
                    self._granted(message)
                case m.PartAnswered() as message:
                    self._answered(message)
                case m.CloseTransfer() as message:
                    self._close_transfer(message.transfer_id)
        return worked

    def _connect(self, message: m.Connect) -> None:
        self._peers[message.peer] = {peer.rank: peer for peer in message.ranks}
        if self._endpoint is None:
            return
        try:
            for peer in message.ranks:
                if not peer.agent_name:
                    continue
                self._endpoint.connect(peer.agent_name, peer.metadata)
                self._endpoint.notify(peer.agent_name, PROBE_PREFIX + message.nonce.encode())
        except TransportError as error:
            self.on_event(m.ProbeFailed(message.peer, str(error)))
        self._probing_until = time.monotonic() + PROBE_SECONDS

    def _disconnect(self, message: m.Disconnect) -> None:
        for peer in self._peers.pop(message.peer, {}).values():
            if self._endpoint is not None and peer.agent_name:
                try:
                    self._endpoint.disconnect(peer.agent_name)
                except TransportError as error:
                    log.info("%s", error)

    def _advance(self, transfer: Transfer) -> bool:
        worked = self._poll_writes(transfer)
        if transfer.closing:
            return self._finish_closing(transfer) or worked
        worked |= self._cut(transfer)
        worked |= self._stage(transfer)
        return worked

    def _cut(self, transfer: Transfer) -> bool:
        """Turns noted layers into jobs: as soon as there are `part_bytes` of them, or the step's last layer."""
        worked = False
        held = transfer.opened.held_tokens
        while transfer.computed:
            layer, begin, end, blocks = transfer.computed.popleft()
            worked = True
            if layer == 0:
                transfer.open_layers, transfer.open_blocks = [], blocks
                transfer.open_tokens = (max(begin, held), end)
                if not transfer.seen_first:
                    transfer.seen_first = True
                    if begin > held:  # our own prefix cache had these: final in every layer
                        self._add_jobs(transfer, range(self._layers), range(held, begin), blocks)
            transfer.open_layers.append(layer)
            begin, end = transfer.open_tokens
            last = layer == self._layers - 1
            size = self._bytes(transfer.opened.flows, len(transfer.open_layers), max(0, end - begin))
            if last or size >= self._config.part_bytes:
                layers = range(transfer.open_layers[0], layer + 1)
                transfer.open_layers = []
                if begin < end:
                    self._add_jobs(transfer, layers, range(begin, end), transfer.open_blocks)
            if last:
                transfer.complete_tokens = transfer.open_tokens[1]
        return worked

    def _add_jobs(self, transfer: Transfer, layers: range, tokens: range, blocks: Sequence[int]) -> None:
        """Cuts so that every part fits one slot: first by layers, then by whole blocks of tokens."""
        for flow in transfer.opened.flows:
            limit = min(transfer.opened.slot_bytes, self._staging.size // 2)
            per_layer = self._bytes([flow], 1, len(tokens))
            layer_step = max(1, limit // per_layer)
            token_step = len(tokens) + self._page  # one part
            if per_layer > limit:
                page_bytes = self._bytes([flow], 1, self._page)
                token_step = max(1, limit // page_bytes) * self._page
            for layer in range(layers.start, layers.stop, layer_step):
                begin = tokens.start
                while begin < tokens.stop:
                    # Cut at block borders, whatever token the range begins at.
                    end = min(tokens.stop, (begin // self._page) * self._page + token_step)
                    ids = blocks[begin // self._page : -(-end // self._page)]
                    job = Job(range(layer, min(layer + layer_step, layers.stop)), range(begin, end), ids)
                    transfer.jobs.append((job, flow))
                    begin = end

    def _stage(self, transfer: Transfer) -> bool:
        """Gathers jobs while staging has room. Two parts ahead of the writes are enough to keep both busy."""
        worked = False
        while transfer.jobs:
            waiting = sum(part.write is None and part.grant is None for part in transfer.parts.values())
            if waiting >= 2:
                break
            job, flow = transfer.jobs[0]
            size = self._bytes([flow], len(job.layers), len(job.tokens))
            chunk = self._staging.take(size)
            if chunk is None:
                break
            transfer.jobs.popleft()
            self._gather(transfer, job, flow, chunk, size)
            worked = True
        done = not transfer.jobs and transfer.complete_tokens >= transfer.opened.token_count
        if done and not transfer.computed and not transfer.announced:
            self._announce(transfer)
            worked = True
        return worked

    def _gather(self, transfer: Transfer, job: Job, flow: Flow, chunk: Chunk, size: int) -> None:
        cache = self._cache
        data = self._staging.view(chunk, size)
        heads = range(flow.head_begin - self._heads[0], flow.head_end - self._heads[0])
        shape = (len(job.layers), 2, len(heads), len(job.tokens), cache.shape[5])
        gather(cache, data.view(cache.dtype).view(shape), job.block_ids, job.layers, heads, job.tokens)
        index = transfer.counts.get(flow.target_rank, 0)
        transfer.counts[flow.target_rank] = index + 1
        part = Part(flow, index, job, chunk, size, digest(data, self._digest_kind))
        transfer.parts[flow.target_rank, index] = part
        transfer.bytes += size
        self._want_slot(transfer, part)

    def _want_slot(self, transfer: Transfer, part: Part) -> None:
        self.on_event(
            m.SlotWanted(transfer.opened.transfer_id, self.rank, part.flow.target_rank, part.index, part.size)
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
        part.grant = grant
        header = self._header(transfer, part, grant).SerializeToString()
        data = self._staging.view(part.chunk, part.size)
        opened = transfer.opened
        if opened.transport == "grpc" or self._endpoint is None:
            self.on_event(m.PartBytes(opened.transfer_id, header, data.cpu().numpy().tobytes()))
            return
        peer = self._peers.get(opened.peer, {}).get(grant.target_rank)
        try:
            if peer is None:
                raise TransportError(f"rank {grant.target_rank} of {opened.peer} is unknown")
            part.write = self._endpoint.write(peer.agent_name, data, grant.address, grant.device, header)
        except TransportError as error:
            self.on_event(m.TransferFailed(opened.transfer_id, str(error)))

    def _header(self, transfer: Transfer, part: Part, grant: m.Granted) -> handoff_pb2.PartHeader:
        opened = transfer.opened
        return handoff_pb2.PartHeader(
            transfer_id=opened.transfer_id,
            prefill_epoch=opened.prefill_epoch,
            decode_epoch=opened.decode_epoch,
            generation=grant.generation,
            slot=grant.slot,
            source_rank=self.rank,
            target_rank=grant.target_rank,
            part=part.index,
            layer_begin=part.job.layers.start,
            layer_end=part.job.layers.stop,
            token_begin=part.job.tokens.start,
            token_end=part.job.tokens.stop,
            head_begin=part.flow.head_begin,
            head_end=part.flow.head_end,
            bytes=part.size,
            digest_kind=self._digest_kind,
            digest=part.digest,
        )

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
            if part.verified:
                self._staging.give_back(part.chunk)
                del transfer.parts[key]
                worked = True
        return worked

    def _answered(self, answer: m.PartAnswered) -> None:
        transfer = self._transfers.get(answer.transfer_id)
        part = transfer.parts.get((answer.target_rank, answer.part)) if transfer else None
        if transfer is None or part is None or transfer.closing:
            return
        if not answer.verified:
            part.grant = None
            self._want_slot(transfer, part)
            return
        part.verified = True
        self._poll_writes(transfer)  # the bytes have left; the handle may need one more poll to know

    def _close_transfer(self, transfer_id: bytes) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            transfer.closing = True
            self._by_request.pop(transfer.opened.request_id, None)

    def _finish_closing(self, transfer: Transfer) -> bool:
        """Says Drained once no write is pending: an error counts as terminal, never as "did not land"."""
        if any(part.write is not None for part in transfer.parts.values()):
            return False
        for part in transfer.parts.values():
            self._staging.give_back(part.chunk)
        transfer.parts.clear()
        transfer.jobs.clear()
        del self._transfers[transfer.opened.transfer_id]
        self.on_event(m.TransferDrained(transfer.opened.transfer_id, self.rank))
        return True
