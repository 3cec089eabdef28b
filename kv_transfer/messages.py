"""What a leader tells its ranks' hand-off endpoints, and what they tell it: plain data, of types that msgpack has
(worker/ranks/pipe.py).

A rank may live in its leader's process or in another one; neither side can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.layout.geometry import Flow

DRAM, VRAM = "DRAM", "VRAM"  # NIXL's names
PROBE_PREFIX = b"probe:"  # of the notification that finds out whether NIXL reaches a rank; a nonce follows


@dataclass(frozen=True)
class PeerRank:
    """A rank of the other worker: how its transport endpoint is reached."""

    rank: int
    agent_name: str
    metadata: bytes
    memory: str = DRAM  # where its slots lie
    device: int = 0  # its index in the rank's process
    digest_kinds: tuple[str, ...] = ()  # that it can compute on its device, the fastest first


# --- leader → sending rank ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connect:
    """A pair comes up: remember the peer's ranks under `peer`, and send each a probe. Without a nonce: it has
    new memory, and there is nothing to probe."""

    peer: str
    ranks: Sequence[PeerRank]
    nonce: str
    anew: bool = False  # the connections that are there did not serve


@dataclass(frozen=True)
class Disconnect:
    peer: str


@dataclass(frozen=True)
class OpenTransfer:
    """KV of engine request `request_id`, tokens [held_tokens, token_count), goes to `peer`."""

    transfer_id: bytes
    request_id: str
    peer: str
    transport: str
    flows: Sequence[Flow]
    held_tokens: int
    token_count: int
    slot_bytes: int
    prefill_epoch: int
    decode_epoch: int
    acknowledge: bool = False  # by TransferOpened
    digests: str = ""  # as the pair has agreed; "" = this rank's own setting
    digest_kind: str = ""


@dataclass(frozen=True)
class TransferOpened:
    """Every layer that is computed from here on will be noted."""

    transfer_id: bytes
    source_rank: int


@dataclass(frozen=True)
class Granted:
    transfer_id: bytes
    target_rank: int
    part: int
    slot: int
    generation: int
    address: int
    device: int
    deadline_seconds: float


@dataclass(frozen=True)
class PartAnswered:
    transfer_id: bytes
    target_rank: int
    part: int
    verified: bool


@dataclass(frozen=True)
class CloseTransfer:
    """Committed, or given up: stop posting; answer Drained when every handle is terminal."""

    transfer_id: bytes


# --- sending rank → leader ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotWanted:
    transfer_id: bytes
    source_rank: int
    target_rank: int
    part: int
    bytes: int


@dataclass(frozen=True)
class PartBytes:
    """gRPC transport: the leader's stream carries the bytes. `header` is a serialised PartHeader."""

    transfer_id: bytes
    header: bytes
    payload: bytes


@dataclass(frozen=True)
class AllGathered:
    """Every token of every layer is in a part: how many parts each of this rank's flows has."""

    transfer_id: bytes
    source_rank: int
    parts: Sequence[tuple[int, int]]  # (target rank, parts)
    bytes: int


@dataclass(frozen=True)
class TransferFailed:
    transfer_id: bytes
    reason: str


@dataclass(frozen=True)
class TransferDrained:
    transfer_id: bytes
    source_rank: int


@dataclass(frozen=True)
class ProbeFailed:
    peer: str
    reason: str


# --- leader → receiving rank -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpectTransfer:
    """Where this rank's parts of a transfer go, valid until ForgetTransfer.

    Sent once per transfer and not with each part: a long prompt has thousands of blocks, and the message is encoded for
    a rank in another process.
    """

    transfer_id: bytes
    prefill_epoch: int
    block_ids: Sequence[int]  # of the whole request, in the order of its tokens
    held_tokens: int  # leading tokens in blocks that other requests share: never written to
    token_count: int
    flows: Sequence[Flow]  # to this rank
    digests: str  # "off" | "sample" | "all": which parts carry a digest
    digest_kind: str


@dataclass(frozen=True)
class Expect:
    """A slot is granted to this part; ExpectTransfer of its transfer came before."""

    slot: int
    generation: int
    transfer_id: bytes
    part: int
    source_rank: int


@dataclass(frozen=True)
class ForgetTransfer:
    """Drop what still lands of the transfer. With `confirm`, answered by Confirmed once no scatter of it runs."""

    transfer_id: bytes
    confirm: bool = True


@dataclass(frozen=True)
class Settle:
    """Poll for a moment, so that whatever is still on its way has landed. Confirmed with the token."""

    token: bytes


@dataclass(frozen=True)
class Land:
    """gRPC transport: put these bytes into the slot, then treat them as landed."""

    header: bytes
    payload: bytes


@dataclass(frozen=True)
class NewEpoch:
    """The worker rejoined: parts addressed to an earlier epoch are stale, and nothing is expected any more."""

    epoch: int


@dataclass(frozen=True)
class Wake:
    """Something is about to come: a rank that polls slowly in idleness polls fast for a while."""


@dataclass(frozen=True)
class AddSegment:
    slots: int


# --- receiving rank → leader -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartLanded:
    """Verified and scattered, or not (`error` says why: "digest" or what else is wrong)."""

    rank: int
    slot: int
    generation: int
    transfer_id: bytes
    source_rank: int
    part: int
    layers: tuple[int, int]
    tokens: tuple[int, int]
    bytes: int
    error: str


@dataclass(frozen=True)
class PartsLanded:
    """In the order of landing. Together, because every event interrupts the leader's event loop."""

    parts: Sequence[PartLanded]


@dataclass(frozen=True)
class RankFailed:
    """Of either side: nothing lands at it, or leaves it, any more."""

    rank: int
    reason: str


@dataclass(frozen=True)
class ProbeArrived:
    rank: int
    nonce: str


@dataclass(frozen=True)
class SegmentAdded:
    rank: int
    addresses: Sequence[int]
    metadata: bytes  # of the rank's agent, from now on


@dataclass(frozen=True)
class Confirmed:
    """ForgetTransfer or Settle is done."""

    rank: int
    token: bytes


ToSender = Connect | Disconnect | OpenTransfer | Granted | PartAnswered | CloseTransfer
FromSender = (
    TransferOpened
    | SlotWanted
    | PartBytes
    | AllGathered
    | TransferFailed
    | TransferDrained
    | ProbeFailed
    | RankFailed
)
ToReceiver = ExpectTransfer | Expect | ForgetTransfer | Settle | Land | NewEpoch | Wake | AddSegment
FromReceiver = PartsLanded | RankFailed | ProbeArrived | SegmentAdded | Confirmed
