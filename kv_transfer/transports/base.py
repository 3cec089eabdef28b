"""The contract of a one-sided transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class PendingWrite(Protocol):
    """A write on its way. There is no way to take it back: it may land until `poll` says it is terminal."""

    def poll(self) -> str:
        """ "pending", "done" or "error"; an error means terminal, never "did not land"."""


class Endpoint(Protocol):
    """One rank's end. Not thread-safe: one thread uses it."""

    name: str

    @property
    def metadata(self) -> bytes: ...

    def register(self, memory: Tensor) -> None: ...

    def connect(self, agent_name: str, metadata: bytes) -> None:
        """May be repeated, with more memory, too. A connection that is known to have broken is made anew. Raises
        TransportError."""

    def disconnect(self, agent_name: str) -> None:
        """Nothing is written to it until the next `connect`; what the pair holds may be kept until then. Never
        while a write to it is pending."""

    def forget(self, agent_name: str) -> None:
        """What the pair holds is given up: the next `connect` begins from nothing. Never while a write to it is
        pending: it would be an error at once, and its bytes would land all the same."""

    def write(
        self,
        agent_name: str,
        pieces: Sequence[Tensor],
        address: int,
        device: int,
        notification: bytes,
        memory: str = "DRAM",
    ) -> PendingWrite:
        """Start copying `pieces` (contiguous uint8, registered), one after the other, to `address` at the peer.

        `memory` ("DRAM" or "VRAM") and `device` say where that address is; the peer gets the notification after the
        bytes. Raises TransportError.
        """

    def notify(self, agent_name: str, message: bytes) -> None: ...

    def notifications(self) -> list[bytes]:
        """What has come since the last call; also drives progress, so both sides must call it."""

    def close(self) -> None: ...
