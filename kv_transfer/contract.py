"""The contract between the hand-off and the worker it runs in.

Everything here runs on the worker's event loop. `kv_transfer` moves and verifies bytes; the role above owns the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from wire import common_pb2, handoff_pb2

TransferId = bytes  # 16 bytes, drawn by the router for every attempt


class HandoffState(Enum):
    """A hand-off at the decode worker."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True)
class Reservation:
    """Blocks of the decode worker's engine.

    `block_ids` are for the prompt and its projected growth, in order; the first `held_tokens` tokens (whole blocks) are in
    the worker's prefix cache already and are not shipped.
    """

    block_ids: list[int]
    held_tokens: int


@dataclass(frozen=True)
class HandoffReport:
    """Figures of a committed hand-off, at the sender."""

    held_tokens: int
    bytes_shipped: int
    parts: int
    transport: str
    exposed_seconds: float


class DecodeEngine(Protocol):
    """Calls of the receiver to the decode worker."""

    async def reserve(self, request: handoff_pb2.Reserve) -> Reservation:
        """Reserve all blocks or none. Raises BlocksExhaustedError with a retry hint, or StaleTransferError."""

    async def commit(
        self, transfer_id: TransferId, first_tokens: Sequence[common_pb2.Token], report: common_pb2.WorkReport
    ) -> None:
        """Put the request into the running batch: every part is in its blocks."""

    async def abort(self, transfer_id: TransferId, verified_tokens: int) -> None:
        """Free the reservation. Blocks of the first `verified_tokens` tokens, which are verified for every layer and rank,
        may enter the prefix cache."""
