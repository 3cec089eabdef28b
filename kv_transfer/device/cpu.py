"""Parts in main memory: copied and summed at once, on the calling thread."""

from __future__ import annotations

import torch
from torch import Tensor

from kv_transfer.device.base import REACHED, Done, Mark, ReadPart
from kv_transfer.layout import digest
from kv_transfer.layout.conversion import Conversion
from kv_transfer.layout.geometry import gather, pieces, scatter
from kv_transfer.layout.rows import CacheRegion, check_blocks
from kv_transfer.memory import aligned_bytes


class CpuCopier:
    digest_kinds = (digest.XXH3_128, digest.SUM64)

    def __init__(self, kv_cache: Tensor, conversion: Conversion | None = None):
        self._cache = kv_cache
        self._conversion = conversion

    @property
    def device(self) -> torch.device:
        return self._cache.device

    def allocate(self, size: int) -> Tensor:
        return aligned_bytes(size)

    def use_thread(self) -> None: ...

    def mark(self) -> Mark:
        return REACHED

    def enqueued(self) -> Mark:
        return REACHED

    def pieces(self, region: CacheRegion, least_bytes: int) -> list[Tensor] | None:
        return pieces(self._cache, region, least_bytes)

    def read(
        self, region: CacheRegion, into: Tensor, kind: str, after: Mark, *, to_host: bool
    ) -> Done[ReadPart]:
        gather(self._cache, into.view(self._cache.dtype), region)
        return Done(ReadPart([into], digest.digest([into], kind)))

    def fill(self, slot: Tensor, payload: bytes) -> bool:
        slot[: len(payload)].copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        return True

    def digest(self, data: Tensor, kind: str) -> Done[bytes]:
        return Done(digest.digest([data], kind))

    def scatter(self, data: Tensor, region: CacheRegion, after: Mark) -> Done[bool]:
        if self._conversion is None:
            scatter(self._cache, data.view(self._cache.dtype), region)
        else:
            check_blocks(self._cache, region)
            ids = torch.tensor(region.block_ids, dtype=torch.int64)
            self._conversion.scatter(self._cache, data, region, ids)
        return REACHED
