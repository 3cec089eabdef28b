"""A running prefill worker."""

from __future__ import annotations

from typing import Any

from cluster.config.worker import WorkerConfig
from cluster.errors import InternalError
from kv_transfer.prefill_side.sender import HandoffSender
from prefill_worker import metrics
from prefill_worker.role import PrefillRole
from prefill_worker.service import PrefillService
from wire import prefill_pb2_grpc
from worker.core import WorkerCore
from worker.role_worker import RoleWorker


class PrefillWorker(RoleWorker):
    def __init__(self, config: WorkerConfig):
        core = WorkerCore(config)
        self._sender = HandoffSender(
            worker=core.ref,
            layout=core.layout,
            ranks=core.ranks.endpoints,
            config=config.transfer,
            peers=core.peers,
            faults=core.faults,
        )
        self._role = PrefillRole(core, self._sender)
        super().__init__(core, self._role, self._role.attempts, self._sender)
        self._sender.on_failed = lambda reason: core.fail(InternalError(reason))
        core.on_output = self._role.on_output
        core.status = self._status
        core.books = [self._role.admission.check_integrity]
        core.collectors = metrics.collectors(self._role, self._sender)
        service = PrefillService(self._role)
        core.server.add(lambda server: prefill_pb2_grpc.add_PrefillServicer_to_server(service, server))

    def _status(self) -> dict[str, Any]:
        return {
            "attempts": len(self._role.attempts),
            "queued": self._role.admission.waiting,
            "queued_prefill_tokens": self._role.admission.tokens,
            **self._role.arrivals.status(),
            "handoffs": self._sender.handoffs,
            "handoffs_live": self._sender.live,
            "handoffs_refused": self._sender.counts["refused"],
            "parts": self._sender.parts,
            "resends": self._sender.resends,
        }


async def start(config: WorkerConfig) -> PrefillWorker:
    """Loads the model, then serves. Raises ModelError or ConfigError."""
    worker = PrefillWorker(config)
    await worker.start()
    return worker
