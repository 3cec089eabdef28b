"""The contract between the hand-off and the worker it runs in.

Everything here runs on the worker's asyncio loop unless it says otherwise. `kv_transfer` moves and verifies
bytes; the role above decides who may send, and owns the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, Self

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
    """What the decode worker's engine set aside.

    block_ids cover the prompt and its projected growth, in order; the first `held_tokens` tokens (whole
    blocks) are already in the worker's prefix cache and are not shipped.
    """

    block_ids: list[int]
    held_tokens: int


@dataclass(frozen=True)
class HandoffSpec:
    """What is handed over: asked of the decode worker in Reserve."""

    transfer_id: TransferId
    request_id: str
    spec: common_pb2.GenerateSpec
    token_count: int

    @classmethod
    def of(cls, asked: handoff_pb2.Reserve) -> Self:
        return cls(asked.transfer_id, asked.request_id, asked.spec, asked.token_count)


@dataclass(frozen=True)
class HandoffReport:
    """How one hand-off went, at the sender, once D has committed."""

    held_tokens: int
    bytes_shipped: int
    parts: int
    transport: str
    exposed_seconds: float


class DecodeEngine(Protocol):
    """What the receiver asks of the decode worker."""

    async def reserve(self, spec: HandoffSpec) -> Reservation:
        """All blocks or none. Raises BlocksExhaustedError with a retry hint, or StaleTransferError."""

    async def commit(
        self, transfer_id: TransferId, first_tokens: Sequence[common_pb2.Token], report: common_pb2.WorkReport
    ) -> None:
        """Every part is in the blocks: the request joins the running batch."""

    async def abort(self, transfer_id: TransferId, verified_tokens: int) -> None:
        """Frees the reservation; blocks verified for every layer and rank, the first `verified_tokens` tokens'
        worth, may enter the prefix cache."""
