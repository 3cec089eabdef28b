"""A running prefill worker."""

from __future__ import annotations

from dataclasses import replace

from cluster.config.worker import WorkerConfig
from cluster.errors import InternalError
from cluster.membership.status import WorkerStatus
from kv_transfer.prefill_side.sender import HandoffSender
from prefill_worker import metrics
from prefill_worker.role import PrefillRole
from prefill_worker.service import PrefillService
from wire import prefill_pb2_grpc
from worker.core import WorkerCore
from worker.metrics import of_requests
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
            on_failed=lambda reason: core.fail(InternalError(reason)),
        )
        self._role = PrefillRole(core, self._sender)
        super().__init__(core, self._role, self._role.attempts, self._sender)
        core.on_output = self._role.on_output
        core.status = self._status
        core.books = [self._role.admission.check_integrity]
        core.collectors = metrics.collectors(core, self._role, self._sender)
        service = PrefillService(self._role)
        core.server.add(lambda server: prefill_pb2_grpc.add_PrefillServicer_to_server(service, server))

    def _status(self, status: WorkerStatus) -> WorkerStatus:
        role, sender = self._role, self._sender
        return replace(
            of_requests(status, role.attempts, role.admission, role.arrivals),
            handoffs=sender.stats.handoffs,
            handoffs_live=sender.live,
            handoffs_refused=sender.stats.refused,
            parts=sender.stats.parts,
            resends=sender.stats.resends,
        )


async def start(config: WorkerConfig) -> PrefillWorker:
    """Loads the model, then serves. Raises ModelError or ConfigError."""
    worker = PrefillWorker(config)
    await worker.start()
    return worker
