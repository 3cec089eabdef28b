"""The bytes of a rank's parts: read from the KV cache where they lie, or copied into staging."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cluster.config.worker import TransferConfig
from kv_transfer import messages as m
from kv_transfer.device.base import Done, PartCopier, Pending, ReadPart
from kv_transfer.layout.digest import Digests, digest
from kv_transfer.layout.rows import CacheRegion
from kv_transfer.memory import Staging, staging_bytes
from kv_transfer.prefill_side.rank_transfer import Job, Part
from kv_transfer.transports.registry import TRANSPORTS, Endpoints

MIN_PIECE_BYTES = 64 << 10  # shorter pieces are faster copied together first than written one by one


class PartSource:
    def __init__(
        self,
        kv_cache: Tensor,
        first_head: int,
        copier: PartCopier,
        endpoints: Endpoints,
        config: TransferConfig,
    ):
        """`first_head`: of this rank, counted over the whole model."""
        self._first_head = first_head
        self._copier = copier
        self._staging = Staging(copier.allocate(staging_bytes(config)))
        self._config = config
        endpoints.register(self._staging.buffer)
        if kv_cache.device.type == "cpu":
            endpoints.register(kv_cache)

    @property
    def used_bytes(self) -> int:
        return self._staging.size - self._staging.free_bytes

    def in_place(self, job: Job) -> list[Tensor] | None:
        """The part without a copy, if it lies in large pieces. The engine keeps the blocks until this rank reports
        TransferDrained, however the hand-off ends."""
        return self._copier.pieces(self._region(job), MIN_PIECE_BYTES)

    def read(
        self, opened: m.OpenTransfer, part: Part, staged_bytes: Callable[[str], int]
    ) -> Pending[ReadPart] | None:
        """Begin to read a part, with the digest whose kind this sets; None while there is no room for it.

        `staged_bytes(peer)`: of all transfers to that peer.
        """
        flow = part.job.flow
        kind = self.digests(opened).kind_of(
            opened.transfer_id, flow.source_rank, flow.target_rank, part.index
        )
        part.digest_kind = kind
        if part.pieces is not None:
            return Done(ReadPart(part.pieces, digest(part.pieces, kind)))
        return self._gather(opened, part, staged_bytes(opened.peer))

    def digests(self, opened: m.OpenTransfer) -> Digests:
        """Which parts carry which digest, as the pair has agreed; else by this worker's setting."""
        config = self._config
        kind = opened.digest_kind or self._copier.digest_kinds[0]
        return Digests(opened.digests or config.digests, config.digest_sample_share, kind)

    def free(self, part: Part) -> None:
        if part.chunk is not None:
            self._staging.free(part.chunk)
            part.chunk = None

    def _gather(self, opened: m.OpenTransfer, part: Part, own: int) -> Pending[ReadPart] | None:
        """Begin a copy in staging."""
        job = part.job
        if not self._within_share(own, job.bytes):
            return None
        chunk = self._staging.allocate(job.bytes)
        if chunk is None:
            return None
        part.chunk = chunk  # also if the next call raises: then the hand-off's end frees it
        reading = self._copier.read(
            self._region(job),
            self._staging.view(chunk, job.bytes),
            part.digest_kind,
            part.computed,
            to_host=not TRANSPORTS[opened.transport].reads_device_memory,
        )
        if reading is None:
            self.free(part)
        return reading

    def _within_share(self, own: int, size: int) -> bool:
        """Whether `size` more bytes are within a peer's share: half of what the other peers leave, so that a peer that
        reads nothing cannot take all. Writes of its ended hand-offs count until they are terminal."""
        return not own or 2 * (own + size) <= self._staging.free_bytes + own

    def _region(self, job: Job) -> CacheRegion:
        heads = range(job.flow.head_begin - self._first_head, job.flow.head_end - self._first_head)
        return CacheRegion(job.layers, heads, job.tokens, job.block_ids)
