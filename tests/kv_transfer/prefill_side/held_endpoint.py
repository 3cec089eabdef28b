"""A sending rank over a scripted endpoint whose writes end when a test says so: no real transport holds a write back on
demand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kv_transfer import messages as m
from kv_transfer.device.registry import OpenCopier, open_copier
from kv_transfer.layout.geometry import Flow
from kv_transfer.prefill_side.sender_rank import SenderRank
from kv_transfer.transports.base import Arrival
from kv_transfer.transports.registry import Endpoints
from tests.harness.waiting import wait_for
from tests.kv_transfer.pair import BLOCKS, DIM, HEADS, LAYERS, PAGE, SLOT_BYTES, config
from wire import handoff_pb2


@dataclass
class HeldWrite:
    pieces: list[Tensor]
    state: str = "pending"

    def poll(self) -> str:
        return self.state


@dataclass
class HeldEndpoint:
    transport: str = "nixl"
    writes_in_place: bool = True
    name: str = "held"
    metadata: bytes = b""
    writes: dict[str, list[HeldWrite]] = field(default_factory=dict)  # by agent
    connected: set[str] = field(default_factory=set)
    connects: list[str] = field(default_factory=list)

    def register(self, memory: Tensor) -> None: ...

    def connect(self, agent_name: str, metadata: bytes) -> None:
        self.connected.add(agent_name)
        self.connects.append(agent_name)

    def disconnect(self, agent_name: str) -> None:
        self.connected.discard(agent_name)

    def forget(self, agent_name: str) -> None:
        self.connected.discard(agent_name)

    def write(
        self,
        agent_name: str,
        pieces: Sequence[Tensor],
        address: int,
        device: int,
        notification: bytes,
        memory: str = "DRAM",
    ) -> HeldWrite:
        assert agent_name in self.connected
        self.writes.setdefault(agent_name, []).append(HeldWrite(list(pieces)))
        return self.writes[agent_name][-1]

    def notify(self, agent_name: str, message: bytes) -> None: ...

    def arrivals(self) -> list[Arrival]:
        return []

    def close(self) -> None: ...


@dataclass
class SendingRank:
    rank: SenderRank
    endpoint: HeldEndpoint
    events: list[object]

    def open(self, transfer: bytes, peer: str, tokens: int) -> None:
        """Everything is computed and every slot granted."""
        self.rank.handle(m.Connect(peer, [m.PeerRank(0, f"agent-{peer}", b"")], "", "nixl"))
        self.compute(transfer, peer, tokens)
        for part in range(self.parts(transfer)):
            self.rank.handle(grant(transfer, part, part, 1, 4096 * part))

    def compute(self, transfer: bytes, peer: str, tokens: int) -> None:
        self.rank.handle(
            m.OpenTransfer(
                transfer, transfer.hex(), peer, "nixl", [Flow(0, 0, 0, HEADS)], 0, tokens, SLOT_BYTES, 1, 2
            )
        )
        for layer in range(LAYERS):
            self.rank.layer_computed(transfer.hex(), layer, 0, tokens, range(-(-tokens // PAGE)))
        wait_for(lambda: any(self.of(m.AllGathered, transfer)), 60, "all cut")
        wait_for(
            lambda: len(self.of(handoff_pb2.SlotRequest, transfer)) == self.parts(transfer),
            60,
            "slots asked for",
        )

    def of(self, kind: type[Any], transfer: bytes) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind) and e.transfer_id == transfer]

    def parts(self, transfer: bytes) -> int:
        (gathered,) = self.of(m.AllGathered, transfer)
        count: int = gathered.parts[0][1]
        return count

    def written(self, peer: str) -> int:
        return len(self.endpoint.writes.get(f"agent-{peer}", []))


def grant(transfer: bytes, part: int, slot: int, generation: int, address: int) -> handoff_pb2.SlotGrant:
    return handoff_pb2.SlotGrant(
        transfer_id=transfer,
        part=part,
        slot=slot,
        generation=generation,
        address=address,
        deadline_seconds=1.0,
    )


def result(transfer: bytes, part: int, verified: bool) -> handoff_pb2.PartResult:
    return handoff_pb2.PartResult(transfer_id=transfer, part=part, verified=verified)


@contextlib.contextmanager
def sending_rank(
    kv_cache: Tensor | None = None, make_copier: OpenCopier = open_copier
) -> Iterator[SendingRank]:
    endpoint = HeldEndpoint()
    rank = SenderRank(
        rank=0,
        kv_cache=torch.zeros(BLOCKS, LAYERS, 2, HEADS, PAGE, DIM) if kv_cache is None else kv_cache,
        kv_head_range=(0, HEADS),
        endpoints=Endpoints([endpoint]),
        config=config("nixl"),
        make_copier=make_copier,
    )
    events: list[object] = []
    rank.start(events.append)
    yield SendingRank(rank, endpoint, events)
    rank.close()


A, B = b"a" * 16, b"b" * 16  # transfers
