"""The bytes of a rank's parts: read from the KV cache where they lie, or copied into staging."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cluster.config.worker import TransferConfig
from kv_transfer import messages as m
from kv_transfer.layout.digest import Digests, digest
from kv_transfer.layout.geometry import gather, pieces, wait_copied
from kv_transfer.layout.rows import Place
from kv_transfer.memory import Staging
from kv_transfer.prefill_side.rank_transfer import Job, Part
from kv_transfer.transports.registry import Endpoints

MIN_PIECE_BYTES = 64 << 10  # shorter pieces are faster copied together first than written one by one


class PartSource:
    def __init__(self, kv_cache: Tensor, first_head: int, endpoints: Endpoints, config: TransferConfig):
        """`first_head`: of this rank, counted over the whole model."""
        self._cache = kv_cache
        self._first_head = first_head
        self._staging = Staging(max(config.staging_bytes, 2 * config.slot_bytes), kv_cache.device)
        self._config = config
        endpoints.register(self._staging.buffer)
        if self.device.type == "cpu":
            endpoints.register(kv_cache)

    @property
    def device(self) -> torch.device:
        return self._cache.device

    @property
    def used_bytes(self) -> int:
        return self._staging.size - self._staging.free_bytes

    @property
    def max_part_bytes(self) -> int:
        return self._staging.size // 2

    def in_place(self, job: Job) -> list[Tensor] | None:
        """The part without a copy, if it lies in large pieces. The engine keeps the blocks until this rank reports
        TransferDrained, however the hand-off ends."""
        return pieces(self._cache, self._place(job), MIN_PIECE_BYTES)

    def read(
        self, opened: m.OpenTransfer, part: Part, staged_bytes: Callable[[str], int]
    ) -> list[Tensor] | None:
        """What is written for a part, whose digest this sets; None while staging has no room for it.

        `staged_bytes(peer)`: of all transfers to that peer.
        """
        data = part.pieces or self._gather(part, staged_bytes(opened.peer))
        if data is not None:
            wait_copied(self._cache)  # the transports do not wait for CUDA's streams
            flow = part.job.flow
            digests = self.digests(opened)
            part.digest_kind = digests.kind_of(
                opened.transfer_id, flow.source_rank, flow.target_rank, part.index
            )
            part.digest = digest(data, part.digest_kind)
        return data

    def digests(self, opened: m.OpenTransfer) -> Digests:
        """Which parts carry which digest, as the pair has agreed; else by this worker's setting."""
        config = self._config
        mode = opened.digests or config.digests
        return Digests(self.device, mode, config.digest_sample_share, opened.digest_kind)

    def free(self, part: Part) -> None:
        if part.chunk is not None:
            self._staging.free(part.chunk)
            part.chunk = None

    def _gather(self, part: Part, own: int) -> list[Tensor] | None:
        """A copy in staging."""
        job, cache = part.job, self._cache
        if not self._within_share(own, job.bytes):
            return None
        part.chunk = self._staging.allocate(job.bytes)
        if part.chunk is None:
            return None
        data = self._staging.view(part.chunk, job.bytes)
        gather(cache, data.view(cache.dtype), self._place(job))
        return [data]

    def _within_share(self, own: int, size: int) -> bool:
        """Whether `size` more bytes are within a peer's share: half of what the other peers leave, so that a peer that
        reads nothing cannot take all. Writes of its ended hand-offs count until they are terminal."""
        return not own or 2 * (own + size) <= self._staging.free_bytes + own

    def _place(self, job: Job) -> Place:
        heads = range(job.flow.head_begin - self._first_head, job.flow.head_end - self._first_head)
        return Place(job.layers, heads, job.tokens, job.block_ids)
