"""A running decode worker."""

from __future__ import annotations

import logging
from typing import Any

from cluster.config import WorkerConfig
from cluster.errors import InternalError
from decode_worker.role import DecodeRole
from decode_worker.service import DecodeService
from decode_worker.takeover import Takeover
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.ring import SlotState
from wire import decode_pb2_grpc
from worker.core import WorkerCore

log = logging.getLogger(__name__)


class DecodeWorker:
    def __init__(self, config: WorkerConfig):
        self._core = WorkerCore(config)
        core = self._core
        self._role = DecodeRole(core)
        self._receiver = HandoffReceiver(
            worker=core.ref,
            layout=core.layout,
            ranks=core.ranks.endpoints,
            addresses=core.ranks.addresses,
            engine=Takeover(core, self._role),
            config=config.transfer,
            is_ended=self._role.attempts.is_ended,
        )
        self._role.receiver = self._receiver
        self._receiver.on_exhausted = self._exhausted
        core.on_output = self._role.on_output
        core.status = self._status
        core.on_fenced = self._fenced
        service = DecodeService(core, self._role, self._receiver)
        core.server.add(lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(service, server))

    @property
    def worker_id(self) -> str:
        return self._core.worker_id

    @property
    def epoch(self) -> int:
        return self._core.epoch

    @property
    def address(self) -> str:
        return self._core.server.address

    @property
    def metrics_address(self) -> str:
        return self._core.metrics_address

    def healthy(self) -> bool:
        return self._core.host.healthy() and not self._core.failed.done()

    def _exhausted(self, reason: str) -> None:
        """The end of this process is the fence that its landing ring needs."""
        log.error("the decode worker drains and ends: %s", reason)
        self._core.spawn(self._core.leave(InternalError(reason), lambda: len(self._role.attempts) == 0))

    async def wait_failed(self) -> BaseException:
        return await self._core.failed

    async def start(self) -> None:
        await self._core.start()

    async def stop(self) -> None:
        """Finishes what runs, within the drain limit, then leaves."""
        await self._core.drain(lambda: len(self._role.attempts) == 0)
        await self._role.attempts.close()
        await self._receiver.close()
        await self._core.stop()

    async def _fenced(self) -> None:
        """Others have gone on without this worker: nothing that it still does is wanted."""
        await self._role.attempts.cancel_all()
        await self._receiver.rejoin(self._core.ref)

    def _status(self) -> dict[str, Any]:
        counts = self._receiver.counts
        rings = self._receiver.rings
        return {
            "attempts": len(self._role.attempts),
            "handoffs": counts["committed"],
            "handoffs_live": self._receiver.live,
            "handoffs_aborted": counts["aborted"],
            "handoffs_refused": counts["refused"],
            "kv_bytes": counts["bytes"],
            "parts": counts["parts"],
            "digest_failures": counts["part_digest"],
            "ring_slots": sum(len(ring.slots) for ring in rings),
            "ring_free": sum(ring.count(SlotState.FREE) for ring in rings),
            "ring_quarantined": sum(ring.count(SlotState.QUARANTINED) for ring in rings),
            "transfer_rate_bytes_per_second": self._receiver.rate_bytes_per_second,
        }


async def start(config: WorkerConfig) -> DecodeWorker:
    """Loads the model, then serves. Raises ModelError or ConfigError."""
    worker = DecodeWorker(config)
    await worker.start()
    return worker
