"""The decode side of the hand-off benchmark, a process of its own: the product's receiver, without an engine.

Writes to stdout, one JSON object per line: first its address, then, for each committed hand-off, the bytes and the
seconds from the first slot granted to the last part verified. Ends when its stdin closes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import torch

from bench.checkpoint import SHAPE
from bench.handoff_common import BLOCKS, CONFIG, PAGE_SIZE, RAW_BYTES, kv_cache, layout
from kv_transfer.contract import Reservation
from kv_transfer.decode_side.receiver import HandoffReceiver
from kv_transfer.decode_side.receiver_rank import ReceiverRank
from kv_transfer.memory import aligned_bytes
from kv_transfer.transports.nixl import NixlEndpoint
from kv_transfer.transports.registry import Endpoints
from wire import common_pb2, handoff_pb2

EPOCH = 2
RAW_POLL_SECONDS = 50e-6


class BlocksOnly:
    """A DecodeEngine that holds nothing and decodes nothing: every hand-off gets the same blocks."""

    def __init__(self) -> None:
        self.receiver: HandoffReceiver | None = None

    async def reserve(self, request: handoff_pb2.Reserve) -> Reservation:
        return Reservation(list(range(-(-request.token_count // PAGE_SIZE))), 0)

    async def commit(
        self, transfer_id: bytes, first_tokens: Sequence[common_pb2.Token], report: common_pb2.WorkReport
    ) -> None:
        assert self.receiver is not None
        handoff = self.receiver._live[transfer_id]
        times = handoff.times
        say({"bytes": handoff.parts.bytes, "seconds": times.last_part - times.first_part})

    async def abort(self, transfer_id: bytes, verified_tokens: int) -> None:
        say({"error": "a hand-off was aborted"})


def handoff_service(receiver: HandoffReceiver) -> grpc.GenericRpcHandler[Any, Any]:
    """Decode.Handoff, and nothing else of that service."""

    async def handoff(
        requests: AsyncIterator[handoff_pb2.PrefillToDecode], context: Any
    ) -> AsyncIterator[handoff_pb2.DecodeToPrefill]:
        async for reply in receiver.serve(requests):
            yield reply

    handler = grpc.stream_stream_rpc_method_handler(
        handoff,
        request_deserializer=handoff_pb2.PrefillToDecode.FromString,
        response_serializer=handoff_pb2.DecodeToPrefill.SerializeToString,
    )
    return grpc.method_handlers_generic_handler("baton.v1.Decode", {"Handoff": handler})


class RawTarget:
    """Memory that raw NIXL writes go to, and the polling that they need to complete."""

    def __init__(self) -> None:
        self.endpoint = NixlEndpoint(f"raw-target-{os.getpid()}")
        self.memory = aligned_bytes(RAW_BYTES)
        self.endpoint.register(self.memory)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        # Only on request: it must not take the core from the measurement of the product's path.
        while not self._stop.wait(RAW_POLL_SECONDS):
            self.endpoint.arrivals()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def serve() -> None:
    torch.set_num_threads(1)
    cache = kv_cache(BLOCKS)
    rank = ReceiverRank(
        rank=0,
        kv_cache=cache,
        kv_head_range=(0, SHAPE.kv_heads),
        endpoints=Endpoints([NixlEndpoint(f"decode#{os.getpid()}")]),
        config=CONFIG,
        decode_epoch=EPOCH,
    )
    raw = RawTarget()
    engine = BlocksOnly()
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    engine.receiver = HandoffReceiver(
        worker=common_pb2.WorkerRef(worker_id="decode", epoch=EPOCH, address=address),
        layout=layout(),
        ranks=[rank],
        addresses=[rank.first_addresses],
        engine=engine,
        config=CONFIG,
        is_ended=lambda transfer_id: False,
    )
    server.add_generic_rpc_handlers((handoff_service(engine.receiver),))
    await server.start()
    metadata = raw.endpoint.metadata.hex()
    say({"address": address, "agent": raw.endpoint.name, "metadata": metadata, "raw": raw.memory.data_ptr()})
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.strip() == "raw done":
            raw.stop()
    await engine.receiver.close()
    await server.stop(None)


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve())  # as workers do
