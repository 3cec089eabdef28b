"""The contract of a transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kv_transfer.messages import DRAM, VRAM

PROBE_SECONDS = 3.0  # for the answer of a rank of another worker to a probe


def memory_kind(device: torch.device) -> str:
    return DRAM if device.type == "cpu" else VRAM


class PendingWrite(Protocol):
    """A write in progress. It cannot be taken back, and may land until `poll` reports it as terminal."""

    def poll(self) -> str:
        """Return "pending", "done" or "error"; an error means terminal, never "did not land"."""


@dataclass(frozen=True)
class Arrival:
    """The notification of a write. `payload`: its bytes, if the transport has not put them into the slot."""

    notification: bytes
    payload: bytes | None = None


class Endpoint(Protocol):
    """One rank's end of a transport. Not thread-safe: one thread uses it."""

    @property
    def transport(self) -> str:
        """The transport's name."""

    @property
    def name(self) -> str:
        """The name under which peers connect to it, or ""."""

    @property
    def metadata(self) -> bytes:
        """The bytes with which peers connect and write into registered memory."""

    @property
    def writes_in_place(self) -> bool:
        """Whether `write` reads several pieces from where they lie in registered memory; else it takes one."""

    def register(self, memory: Tensor) -> None: ...

    def connect(self, agent_name: str, metadata: bytes) -> None:
        """Connect to a peer, again if it has more memory or the connection has broken. Raises TransportError."""

    def disconnect(self, agent_name: str) -> None:
        """Write nothing to the peer until the next `connect`; the connection may stay open until then. Never call it
        while a write to the peer is pending."""

    def forget(self, agent_name: str) -> None:
        """Close the connection: the next `connect` opens another one. Never call it while a write to the peer is
        pending: the write would be an error at once, and its bytes would still land."""

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

    def arrivals(self) -> list[Arrival]:
        """Return what has arrived since the last call. This also drives progress, so both sides must call it."""

    def close(self) -> None: ...
