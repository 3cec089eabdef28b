"""A sender and a receiver in one process, with the product's own streams, ranks and endpoints between them, and an
engine that only hands out blocks."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch

from cluster.config.worker import TransferConfig
from cluster.faults.points import NO_FAULTS, Faults
from cluster.protocol.kv_format import SCALE_BYTES
from cluster.protocol.kv_heads import head_range
from cluster.protocol.wire_version import WIRE_VERSION
from kv_transfer.contract import HandoffReport, Reservation
from kv_transfer.decode_side.receiver import HandoffReceiver
from kv_transfer.decode_side.receiver_rank import ReceiverRank
from kv_transfer.decode_side.ring import SlotState
from kv_transfer.device.registry import OpenCopier, open_copier
from kv_transfer.layout.conversion import Conversion
from kv_transfer.prefill_side.handoff import OutgoingHandoff
from kv_transfer.prefill_side.sender import HandoffSender
from kv_transfer.prefill_side.sender_rank import SenderRank
from kv_transfer.transports.nixl import NixlEndpoint
from kv_transfer.transports.registry import TRANSPORTS, Endpoints
from wire import common_pb2, decode_pb2_grpc, handoff_pb2

LAYERS, HEADS, PAGE, DIM, BLOCKS = 3, 2, 4, 8, 64
SLOT_BYTES = 4096
DECODE_EPOCH, PREFILL_EPOCH = 2, 1
__all__ = ["TRANSPORTS"]


def config(transport: str, **more: Any) -> TransferConfig:
    sizes = {
        "ring_bytes": 1 << 16,
        "slot_bytes": SLOT_BYTES,
        "part_bytes": SLOT_BYTES,
        "staging_bytes": 1 << 16,
    }
    return TransferConfig(**{"transport": transport, **sizes, **more})


def layout(tensor_parallel: int) -> common_pb2.KvLayout:
    return common_pb2.KvLayout(
        wire_version=WIRE_VERSION,
        model_id="test",
        dtype="float32",
        page_size=PAGE,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        tensor_parallel=tensor_parallel,
    )


def cache(rank: int, tensor_parallel: int) -> torch.Tensor:
    begin, end = head_range(rank, tensor_parallel, HEADS)
    return torch.zeros(BLOCKS, LAYERS, 2, end - begin, PAGE, DIM)


def endpoint() -> NixlEndpoint:
    return NixlEndpoint(f"decode#test-{os.getpid()}-{secrets.token_hex(4)}")


def endpoints(transfer: TransferConfig) -> Endpoints:
    return Endpoints([] if transfer.transport == "grpc" else [endpoint()])


@dataclass(frozen=True)
class Device:
    """Where a side's KV cache lies."""

    make_copier: OpenCopier
    place: Callable[[torch.Tensor], torch.Tensor] = lambda cache: cache


HOST = Device(open_copier)


def before_verify(rank: ReceiverRank, hook: Callable[[torch.Tensor], None]) -> None:
    """Calls `hook` with the bytes of each part that lies in its slot."""
    copier: Any = rank._copier
    digest = type(copier).digest

    def hooked(data: torch.Tensor, kind: str) -> Any:
        hook(data)
        return digest(copier, data, kind)

    copier.digest = hooked


@dataclass
class Blocks:
    """A DecodeEngine without an engine."""

    block_ids: list[int]
    held_tokens: int = 0
    committed: list[bytes] = field(default_factory=list)
    aborted: dict[bytes, int] = field(default_factory=dict)  # transfer → verified tokens

    async def reserve(self, request: handoff_pb2.Reserve) -> Reservation:
        return Reservation(self.block_ids[: -(-request.token_count // PAGE)], self.held_tokens)

    async def commit(
        self, transfer_id: bytes, first_tokens: Sequence[common_pb2.Token], report: common_pb2.WorkReport
    ) -> None:
        self.committed.append(transfer_id)

    async def abort(self, transfer_id: bytes, verified_tokens: int) -> None:
        self.aborted[transfer_id] = verified_tokens


class _Service(decode_pb2_grpc.DecodeServicer):
    def __init__(self, receiver: HandoffReceiver):
        self._receiver = receiver
        self.is_away = False

    def go_away(self) -> None:
        """As a worker that is cut off: what is open breaks, nothing new opens."""
        self.is_away = True
        for link in list(self._receiver._peers.values()):
            link.end()

    async def Handoff(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        if self.is_away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        async for reply in self._receiver.serve(request_iterator):
            yield reply


@dataclass
class Decode:
    receiver: HandoffReceiver
    ranks: list[ReceiverRank]
    caches: list[torch.Tensor]
    engine: Blocks
    ref: common_pb2.WorkerRef
    service: _Service
    exhausted: list[str]  # reasons

    @property
    def rings(self):
        return self.receiver.rings

    def count(self, state: SlotState) -> int:
        return sum(ring.count(state) for ring in self.rings)

    @property
    def all_free(self) -> bool:
        self.receiver.check_integrity()
        return self.count(SlotState.FREE) == sum(len(ring.slots) for ring in self.rings)


@asynccontextmanager
async def decode_side(
    transfer: TransferConfig,
    tensor_parallel: int = 1,
    faults: Faults = NO_FAULTS,
    device: Device = HOST,
    conversion: Conversion | None = None,
) -> AsyncIterator[Decode]:
    """With a `conversion` the caches are int8."""
    caches = [cache(rank, tensor_parallel) for rank in range(tensor_parallel)]
    if conversion is not None:
        caches = [one.new_zeros(*one.shape[:-1], DIM + SCALE_BYTES, dtype=torch.int8) for one in caches]
    ranks = [
        ReceiverRank(
            rank=rank,
            kv_cache=device.place(caches[rank]),
            kv_head_range=head_range(rank, tensor_parallel, HEADS),
            endpoints=endpoints(transfer),
            config=transfer,
            decode_epoch=DECODE_EPOCH,
            conversion=conversion,
            make_copier=None if conversion else device.make_copier,
        )
        for rank in range(tensor_parallel)
    ]
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    ref = common_pb2.WorkerRef(worker_id="decode", epoch=DECODE_EPOCH, address=address)
    engine = Blocks(list(range(BLOCKS - 1, -1, -1)))
    exhausted: list[str] = []
    receiver = HandoffReceiver(
        worker=ref,
        layout=layout(tensor_parallel),
        ranks=ranks,
        addresses=[rank.first_addresses for rank in ranks],
        engine=engine,
        config=transfer,
        is_ended=lambda transfer_id: transfer_id in engine.aborted,
        faults=faults,
        on_exhausted=exhausted.append,
    )
    service = _Service(receiver)  # type: ignore[abstract]  # the test calls no other method
    decode_pb2_grpc.add_DecodeServicer_to_server(service, server)
    await server.start()
    try:
        yield Decode(receiver, ranks, caches, engine, ref, service, exhausted)
    finally:
        await receiver.close()
        await server.stop(None)


@dataclass
class Prefill:
    sender: HandoffSender
    ranks: list[SenderRank]
    caches: list[torch.Tensor]

    async def open(self, decode: common_pb2.WorkerRef, tokens: int) -> OutgoingHandoff:
        """Reserved, and every layer of every token computed."""
        request_id = secrets.token_hex(8)
        wanted = common_pb2.GenerateSpec(n=1, prompt_tokens=bytes(4 * tokens))
        reserve = handoff_pb2.Reserve(
            transfer_id=secrets.token_bytes(16), request_id=request_id, spec=wanted, token_count=tokens
        )
        handoff = await self.sender.reserve(decode, reserve, 10.0)
        await handoff.start(request_id)
        blocks = list(range(-(-tokens // PAGE)))
        half = tokens // 2  # two chunks, the border anywhere in a block
        for begin, end in ((0, half), (half, tokens)):
            for layer in range(LAYERS):
                for rank in self.ranks:
                    rank.layer_computed(request_id, layer, begin, end, blocks[: -(-end // PAGE)])
        return handoff

    async def finish(self, handoff: OutgoingHandoff, tokens: int) -> HandoffReport:
        async with asyncio.timeout(60):
            return await handoff.finish(
                [common_pb2.Token(position=tokens, token_id=1)], common_pb2.WorkReport()
            )

    async def send(self, decode: common_pb2.WorkerRef, tokens: int) -> HandoffReport:
        return await self.finish(await self.open(decode, tokens), tokens)


@asynccontextmanager
async def prefill_side(
    transfer: TransferConfig,
    tensor_parallel: int = 1,
    worker_id: str = "prefill",
    faults: Faults = NO_FAULTS,
    device: Device = HOST,
) -> AsyncIterator[Prefill]:
    torch.manual_seed(1)
    whole = torch.randn(BLOCKS, LAYERS, 2, HEADS, PAGE, DIM)
    caches = []
    for rank in range(tensor_parallel):
        begin, end = head_range(rank, tensor_parallel, HEADS)
        caches.append(whole[:, :, :, begin:end].contiguous())
    ranks = [
        SenderRank(
            rank=rank,
            kv_cache=device.place(caches[rank]),
            kv_head_range=head_range(rank, tensor_parallel, HEADS),
            endpoints=endpoints(transfer),
            config=transfer,
            make_copier=device.make_copier,
        )
        for rank in range(tensor_parallel)
    ]
    worker = common_pb2.WorkerRef(worker_id=worker_id, epoch=PREFILL_EPOCH, address="127.0.0.1:0")
    sender = HandoffSender(
        worker=worker, layout=layout(tensor_parallel), ranks=ranks, config=transfer, faults=faults
    )
    try:
        yield Prefill(sender, ranks, caches)
    finally:
        await sender.close()


def tokens_of(caches: Sequence[torch.Tensor], blocks: Sequence[int], tokens: int) -> torch.Tensor:
    """[token, layer, K|V, head, dim], heads of all ranks together."""
    heads = torch.cat(list(caches), 3)[list(blocks)]
    return heads.permute(0, 4, 1, 2, 3, 5).reshape(-1, LAYERS, 2, HEADS, DIM)[:tokens]


def assert_same(prefill: Prefill, decode: Decode, tokens: int) -> None:
    count = -(-tokens // PAGE)
    held = decode.engine.held_tokens
    sent = tokens_of(prefill.caches, range(count), tokens)
    here = tokens_of(decode.caches, decode.engine.block_ids[:count], tokens)
    assert torch.equal(sent[held:], here[held:])
