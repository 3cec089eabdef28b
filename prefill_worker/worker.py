"""A running prefill worker."""

from __future__ import annotations

from typing import Any

from cluster.config import WorkerConfig
from kv_transfer.sender import HandoffSender
from prefill_worker.role import PrefillRole
from prefill_worker.service import PrefillService
from wire import prefill_pb2_grpc
from worker.core import WorkerCore


class PrefillWorker:
    def __init__(self, config: WorkerConfig):
        self._core = WorkerCore(config)
        core = self._core
        self._sender = HandoffSender(
            worker=core.ref,
            layout=core.layout,
            ranks=core.ranks.endpoints,
            config=config.transfer,
            peers=core.peers,
        )
        self._role = PrefillRole(core, self._sender)
        core.on_output = self._role.on_output
        core.status = self._status
        core.on_fenced = self._fenced
        service = PrefillService(self._role)
        core.server.add(lambda server: prefill_pb2_grpc.add_PrefillServicer_to_server(service, server))

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
        return self._core.host.healthy()

    async def wait_failed(self) -> BaseException:
        return await self._core.failed

    async def start(self) -> None:
        await self._core.start()

    async def stop(self) -> None:
        """Finishes what runs, within the drain limit, then leaves."""
        await self._core.drain(lambda: len(self._role.attempts) == 0)
        await self._role.attempts.close()
        await self._sender.close()
        await self._core.stop()

    async def _fenced(self) -> None:
        """Others have gone on without this worker: nothing that it still does is wanted."""
        await self._role.attempts.cancel_all()
        await self._sender.rejoin(self._core.ref)

    def _status(self) -> dict[str, Any]:
        return {
            "attempts": len(self._role.attempts),
            "handoffs": self._sender.handoffs,
            "handoffs_live": self._sender.live,
            "parts": self._sender.parts,
            "resends": self._sender.resends,
        }


async def start(config: WorkerConfig) -> PrefillWorker:
    """Loads the model, then serves. Raises ModelError or ConfigError."""
    worker = PrefillWorker(config)
    await worker.start()
    return worker
