"""The contract of a part copier.

No method waits: it enqueues work on the device and returns an object whose `result` is polled. A CPU does the work at
once, so that the first poll has its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from kv_transfer.layout.rows import CacheRegion

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Work on a device."""

    def result(self) -> T_co | None:
        """None until the work has ended. Raises what the device reports."""


Mark = Pending[bool]  # reached once all work that was enqueued before it has ended


@dataclass(frozen=True)
class Done(Generic[T]):
    """Work that has ended."""

    value: T

    def result(self) -> T:
        return self.value


REACHED = Done(True)


@dataclass(frozen=True)
class ReadPart:
    """A part as it is written to the peer. Its pieces are valid until `release`."""

    pieces: Sequence[Tensor]
    digest: bytes
    release: Callable[[], None] = lambda: None  # call it once


class PartCopier(Protocol):
    """Copies the parts of one rank's KV cache. One thread uses it, after `use_thread`; any thread may call `mark`.

    A method that returns None or False found no free buffer and has enqueued nothing: it is to be called again later.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def digest_kinds(self) -> tuple[str, ...]:
        """Digest kinds that can be computed here, the fastest first."""

    def allocate(self, size: int) -> Tensor:
        """Memory of the device for parts, uint8 [size], page-aligned. On CUDA its contents are arbitrary."""

    def use_thread(self) -> None:
        """Prepare the calling thread: called once, first, on the thread that uses this copier."""

    def mark(self) -> Mark:
        """Reached once the device has computed everything that the engine has enqueued until now: on the engine's thread
        in the current stream, on the copier's own thread in the stream that was current when the copier was made."""

    def enqueued(self) -> Mark:
        """Reached once everything that this copier itself has enqueued until now has ended."""

    def pieces(self, region: CacheRegion, least_bytes: int) -> list[Tensor] | None:
        """Views of the part in the cache, each of at least `least_bytes`, in the order of the wire; None if a transport
        should not read it there. Raises IndexError for a block that does not exist."""

    def read(
        self, region: CacheRegion, into: Tensor, kind: str, after: Mark, *, to_host: bool
    ) -> Pending[ReadPart] | None:
        """Copy a part from the cache to `into` (uint8, of this device) and compute its digest, once `after` is reached.

        With `to_host` the result's pieces are in main memory. Raises IndexError for a block that does not exist.
        """

    def fill(self, slot: Tensor, payload: bytes) -> bool:
        """Copy `payload` to the beginning of `slot`, before any work that is enqueued later."""

    def digest(self, data: Tensor, kind: str) -> Pending[bytes] | None:
        """Compute the digest of `data` (uint8, of this device). `kind`: one of `digest_kinds`, or digest.NONE, which
        gives b""."""

    def scatter(self, data: Tensor, region: CacheRegion, after: Mark) -> Pending[bool] | None:
        """Copy a part from `data` (uint8) into the cache, once `after` is reached. Raises IndexError as `read` does."""
