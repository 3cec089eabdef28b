"""Messages between a leader and the hand-off endpoints of its ranks, in the same process or in others.

What also travels between the workers is the protobuf message itself; the rest are dataclasses of types that msgpack has
(worker/ranks/pipe.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.layout.geometry import Flow
from wire.handoff_pb2 import PartData, PartResult, SlotGrant, SlotRequest

DRAM, VRAM = "DRAM", "VRAM"  # NIXL's names
PROBE_PREFIX = b"probe:"  # of the notification that tests whether a transport reaches a rank; a nonce follows


@dataclass(frozen=True)
class PeerRank:
    """How a rank is reached, and what it can do."""

    rank: int
    agent_name: str
    metadata: bytes
    memory: str = DRAM  # of its slots
    device: int = 0  # its index in the rank's process
    digest_kinds: tuple[str, ...] = ()  # that it can compute on its device, the fastest first
    transports: tuple[str, ...] = ("grpc",)  # that it has an endpoint of; known of our own ranks only


# --- leader → sending rank ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connect:
    """Connect to the ranks of `peer`, and send each a probe if there is a nonce. `worker`: the decode worker at its
    address, which keeps its agents under other epochs."""

    peer: str
    ranks: Sequence[PeerRank]
    nonce: str
    transport: str
    reconnect: bool = False  # replace the connections that are open
    worker: str = ""


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
    acknowledge: bool = False  # with TransferOpened
    digests: str = ""  # of the pair; "" = this rank's own setting
    digest_kind: str = ""


@dataclass(frozen=True)
class TransferOpened:
    """Every layer that is computed from now on will be sent."""

    transfer_id: bytes
    source_rank: int


@dataclass(frozen=True)
class CloseTransfer:
    """Committed or aborted: stop posting, and answer TransferDrained when every write is terminal."""

    transfer_id: bytes


# --- sending rank → leader ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllGathered:
    """Every layer of every token is in a part: the number of parts of each of this rank's flows."""

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
# A rank also gets each SlotGrant to a part that goes to it; ExpectTransfer of its transfer comes before.


@dataclass(frozen=True)
class ExpectTransfer:
    """Where this rank's parts of a transfer go, until ForgetTransfer.

    Sent once per transfer, not with each part: a long prompt has thousands of blocks.
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
class ForgetTransfer:
    """Drop what still lands of the transfer. With `confirm`, answered by Confirmed once no scatter of it runs."""

    transfer_id: bytes
    confirm: bool = True


@dataclass(frozen=True)
class Settle:
    """Poll for a moment, so that writes still in a socket have landed. Answered by Confirmed with the token."""

    token: bytes


@dataclass(frozen=True)
class NewEpoch:
    """The worker rejoined under a new epoch: parts of earlier ones are stale, and nothing is expected."""

    epoch: int


@dataclass(frozen=True)
class Wake:
    """A peer has connected: an idle rank polls fast for a while."""


@dataclass(frozen=True)
class AddSegment:
    slots: int


# --- receiving rank → leader -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartLanded:
    """A part was verified and scattered, or refused for the reason in `error` ("digest", …)."""

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
    """In the order of landing; several together, because every event interrupts the leader's event loop."""

    parts: Sequence[PartLanded]


@dataclass(frozen=True)
class RankFailed:
    """The rank's thread has ended with an exception: it sends or receives nothing more."""

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
    metadata: bytes  # of the rank's agent, the new memory included


@dataclass(frozen=True)
class Confirmed:
    """ForgetTransfer or Settle is done."""

    rank: int
    token: bytes


WIRE_MESSAGES = (SlotRequest, SlotGrant, PartData, PartResult)
ToSender = Connect | Disconnect | OpenTransfer | SlotGrant | PartResult | CloseTransfer
FromSender = (
    TransferOpened
    | SlotRequest
    | PartData
    | AllGathered
    | TransferFailed
    | TransferDrained
    | ProbeFailed
    | RankFailed
)
ToReceiver = ExpectTransfer | SlotGrant | ForgetTransfer | Settle | PartData | NewEpoch | Wake | AddSegment
FromReceiver = PartsLanded | RankFailed | ProbeArrived | SegmentAdded | Confirmed
