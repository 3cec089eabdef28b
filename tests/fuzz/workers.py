"""A prefill and a decode worker in this process, on a thread of their own, so that their blocks can be counted."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc

from cluster.config.worker import EngineConfig, TransferConfig, WorkerConfig
from cluster.membership.topology import Location
from decode_worker import worker as decode_worker
from kv_transfer.decode_side.ring import SlotState
from prefill_worker import worker as prefill_worker
from router.link.token import Token
from tests.harness.link_client import BlockingLinkClient, Reading
from wire import common_pb2
from worker.worker import Worker

T = TypeVar("T")
QUIET_SECONDS = 30.0


class Errors(logging.Handler):
    """Errors in the log: malformed messages must cause none."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(self.format(record))


class Pair:
    prefill: Worker
    decode: Worker

    def __init__(self, loop: asyncio.AbstractEventLoop, errors: Errors):
        self._loop = loop
        self.errors = errors
        self.client = BlockingLinkClient()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def start(self, model: Path) -> None:
        engine = EngineConfig(model=model, dtype="float32", kv_memory_bytes=8 << 20, max_batch_tokens=128)
        transfer = TransferConfig(
            transport="grpc", ring_bytes=1 << 20, ring_max_bytes=4 << 20, slot_bytes=1 << 16
        )
        self.decode = await decode_worker.start(WorkerConfig(role="decode", engine=engine, transfer=transfer))
        self.prefill = await prefill_worker.start(
            WorkerConfig(role="prefill", engine=engine, transfer=transfer)
        )

    def read(self, worker: Worker, transfer_id: bytes, spec: common_pb2.GenerateSpec) -> Reading:
        """A handle at the worker, whose reference belongs in the Run of the attempt."""
        return self.client.read(worker._identity.registration(Location()), transfer_id, spec)

    def answer(
        self, channels: dict[str, grpc.Channel], method: str, asked: Any, seconds: float = 60.0
    ) -> tuple[list[Token], common_pb2.AttemptEnd]:
        """Dispatch a Run and read it to its end. Raises grpc.RpcError, BatonError if it was lost, or TimeoutError."""
        worker = self.prefill if method.startswith("Prefill") else self.decode
        reading = self.read(worker, asked.transfer_id, asked.spec)
        asked.handle.CopyFrom(reading.reference)
        channel = channels[method.partition("/")[0]]
        channel.unary_unary(f"/baton.v1.{method}", None, None)(asked.SerializeToString(), timeout=seconds)
        end = self.client.end_of(reading, seconds)
        return [token for tokens in reading.tokens.values() for token in tokens], end

    @property
    def layout(self) -> common_pb2.KvLayout:
        return self.decode._identity.layout

    def check_well(self) -> None:
        """Everything allocated is freed within the detach times, and no worker failed."""
        deadline = time.monotonic() + QUIET_SECONDS
        while (left := self.call(self._left())) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, left
        assert self.prefill.healthy() and self.decode.healthy()
        assert not self.errors.said, self.errors.said[:3]

    async def end_tasks(self) -> None:
        """What a process exit ends, such as a repeated notice to a peer that is gone; here its loop would go on."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _left(self) -> dict[str, int]:
        decode: Any = self.decode._role
        prefill: Any = self.prefill._role
        rings = decode.receiver.rings
        found = {
            "attempts at the decode worker": len(decode.attempts),
            "attempts at the prefill worker": len(prefill.attempts),
            "hand-offs": decode.receiver.live,
            "slots": sum(len(ring.slots) - ring.count(SlotState.FREE) for ring in rings),
            "queued": decode.attempts.admission.waiting + prefill.prefilling.admission.waiting,
            "inside": decode.attempts.admission.inside_tokens + prefill.prefilling.admission.inside_tokens,
            "blocks at the decode worker": self.decode._engine.engine.stats().blocks_held,
            "blocks at the prefill worker": self.prefill._engine.engine.stats().blocks_held,
        }
        for ring in rings:
            ring.check_integrity()
        if not any(found.values()):
            for one in (self.decode, self.prefill):
                await one._engine.host.call(lambda engine: engine.check_integrity())
        return {name: count for name, count in found.items() if count}


@contextmanager
def running_pair(model: Path) -> Iterator[Pair]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="workers")
    thread.start()
    errors = Errors()
    logging.getLogger().addHandler(errors)
    pair = Pair(loop, errors)
    try:
        pair.call(pair.start(model))
        yield pair
        pair.check_well()
        pair.client.close()
        pair.call(pair.prefill.stop())
        pair.call(pair.decode.stop())
        pair.call(pair.end_tasks())
    finally:
        logging.getLogger().removeHandler(errors)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
