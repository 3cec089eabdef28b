"""The two processes of a hand-off on one card: the product's ranks and streams, without an engine.

`python -m tests.gpu.handoff_sides SETUP` runs the decode side. It writes to stdout, one JSON object per line: its
address, what bench/handoff_peer.py says of each committed hand-off, and for each line of stdin the sum of its KV cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import torch
from torch import Tensor

from bench.checkpoint import ModelShape
from bench.handoff_common import layout
from bench.handoff_peer import EPOCH, BlocksOnly, handoff_service, say
from cluster.config.worker import TransferConfig
from kv_transfer.decode_side.receiver import HandoffReceiver
from kv_transfer.decode_side.receiver_rank import ReceiverRank
from kv_transfer.prefill_side.sender import HandoffSender
from kv_transfer.prefill_side.sender_rank import SenderRank
from kv_transfer.transports.registry import open_endpoints
from wire import common_pb2, handoff_pb2
from worker.server import OPTIONS

PAGE = 16
DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Setup:
    device: str
    transport: str
    layers: int
    kv_heads: int
    head_dim: int
    tokens: int
    weights: int  # of a layer, by which a prefill of it takes its time

    @property
    def blocks(self) -> int:
        return self.tokens // PAGE

    @property
    def bytes(self) -> int:
        return self.tokens * self.layers * 2 * self.kv_heads * self.head_dim * 2

    @property
    def config(self) -> TransferConfig:
        config = TransferConfig(transport=self.transport)
        return config.for_gpus() if self.device == "cuda" else config

    @property
    def layout(self) -> common_pb2.KvLayout:
        return layout(ModelShape(layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim), PAGE)

    def kv_cache(self) -> Tensor:
        """Of twice the blocks, so that a part's blocks are not all of them."""
        shape = (2 * self.blocks, self.layers, 2, self.kv_heads, PAGE, self.head_dim)
        return torch.zeros(shape, dtype=torch.bfloat16, device=self.device)

    def endpoints(self, name: str) -> Any:
        return open_endpoints(self.config, f"{name}-{os.getpid()}", 1, 0, host="127.0.0.1", tls=False)


def sum_of(blocks: Tensor) -> int:
    """Of every element, weighted by its place."""
    words = blocks.reshape(-1).view(torch.int16).to(torch.int64)
    return int((words * torch.arange(1, words.numel() + 1, device=words.device)).sum())


class PrefillSide:
    """Computes layers one after the other on the current stream, as an engine does, and hands them over meanwhile."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.cache = setup.kv_cache()
        hidden = 64 if setup.device == "cpu" else 4096
        made: dict[str, Any] = {"dtype": torch.bfloat16, "device": setup.device}
        self._x = torch.ones(setup.tokens, hidden, **made)
        self._weights = torch.full((hidden, setup.weights // hidden), 0.01, **made)
        self._kv = torch.randn(self.cache.shape[0], *self.cache.shape[2:], **made)
        # Every other block, so that no two of them lie together.
        self._ids = list(range(0, 2 * setup.blocks, 2))
        self.rank = SenderRank(
            rank=0,
            kv_cache=self.cache,
            kv_head_range=(0, setup.kv_heads),
            endpoints=setup.endpoints("prefill"),
            config=setup.config,
        )
        worker = common_pb2.WorkerRef(worker_id="prefill", epoch=1, address="127.0.0.1:0")
        self.sender = HandoffSender(
            worker=worker, layout=setup.layout, ranks=[self.rank], config=setup.config
        )

    async def hand_over(self, address: str, number: int) -> tuple[float, float, str]:
        """(seconds of prefill, seconds from its end to the commit, transport)"""
        decode = common_pb2.WorkerRef(worker_id="decode", epoch=EPOCH, address=address)
        request_id = secrets.token_hex(8)
        reserve = handoff_pb2.Reserve(
            transfer_id=secrets.token_bytes(16),
            request_id=request_id,
            spec=common_pb2.GenerateSpec(n=1),
            token_count=self.setup.tokens,
        )
        handoff = await self.sender.reserve(decode, reserve, DEADLINE_SECONDS)
        await handoff.start(request_id)
        began, ended = await _on_thread(lambda: self._prefill(request_id, number))
        token = common_pb2.Token(position=self.setup.tokens, token_id=1)
        report = await handoff.finish([token], common_pb2.WorkReport())
        return ended - began, time.perf_counter() - ended, report.transport

    def _prefill(self, request_id: str, number: int) -> tuple[float, float]:
        """Every layer's KV is another one than in the run before: bytes that were read too early are wrong."""
        began = time.perf_counter()
        for layer in range(self.setup.layers):
            torch.mm(self._x, self._weights)
            torch.mul(self._kv, number + layer, out=self.cache[:, layer])
            self.rank.layer_computed(request_id, layer, 0, self.setup.tokens, self._ids)
        if self.setup.device != "cpu":
            torch.cuda.current_stream().synchronize()
        return began, time.perf_counter()

    def sent_sum(self) -> int:
        return sum_of(self.cache[self._ids])


async def _on_thread(work: Callable[[], Any]) -> Any:
    """On a thread of its own, as an engine's."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, result)

    threading.Thread(target=run, daemon=True).start()
    return await done


async def serve(setup: Setup) -> None:
    torch.set_num_threads(1)
    cache = setup.kv_cache()
    rank = ReceiverRank(
        rank=0,
        kv_cache=cache,
        kv_head_range=(0, setup.kv_heads),
        endpoints=setup.endpoints("decode"),
        config=setup.config,
        decode_epoch=EPOCH,
    )
    engine = BlocksOnly()
    server = grpc.aio.server(options=OPTIONS)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    engine.receiver = HandoffReceiver(
        worker=common_pb2.WorkerRef(worker_id="decode", epoch=EPOCH, address=address),
        layout=setup.layout,
        ranks=[rank],
        addresses=[rank.first_addresses],
        engine=engine,
        config=setup.config,
        is_ended=lambda transfer_id: False,
    )
    server.add_generic_rpc_handlers((handoff_service(engine.receiver),))
    await server.start()
    say({"address": address})
    while await asyncio.to_thread(sys.stdin.readline):
        say({"sum": sum_of(cache[: setup.blocks])})
    await engine.receiver.close()
    await server.stop(None)


def to_json(setup: Setup) -> str:
    return json.dumps(asdict(setup))


if __name__ == "__main__":
    asyncio.run(serve(Setup(**json.loads(sys.argv[1]))))
