"""A running decode worker."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from cluster.config.worker import WorkerConfig
from cluster.errors import InternalError
from cluster.membership.status import WorkerStatus
from decode_worker import metrics
from decode_worker.doubt_watch import open_doubt_watch
from decode_worker.engine_adapter import HandoffEngineAdapter
from decode_worker.role import DecodeRole
from decode_worker.service import DecodeService
from kv_transfer.decode_side.receiver import HandoffReceiver
from kv_transfer.decode_side.ring import SlotState
from wire import decode_pb2_grpc
from worker.core import WorkerCore
from worker.metrics import of_requests
from worker.role_worker import RoleWorker

log = logging.getLogger(__name__)


class DecodeWorker(RoleWorker):
    def __init__(self, config: WorkerConfig):
        core = WorkerCore(config)
        self._role = DecodeRole(core)
        self._receiver = HandoffReceiver(
            worker=core.ref,
            layout=core.layout,
            ranks=core.ranks.endpoints,
            addresses=core.ranks.addresses,
            engine=HandoffEngineAdapter(core, self._role),
            config=config.transfer,
            is_ended=self._role.attempts.is_ended,
            faults=core.faults,
            on_exhausted=self._exhausted,
        )
        super().__init__(core, self._role, self._role.attempts, self._receiver)
        self._role.receiver = self._receiver
        self._doubts = open_doubt_watch(config, self._receiver)
        self._watching: asyncio.Task[None] | None = None
        core.on_output = self._role.on_output
        core.status = self._status
        core.books = [self._role.admission.check_integrity, self._receiver.check_integrity]
        core.collectors = metrics.collectors(core, self._role, self._receiver)
        service = DecodeService(core, self._role, self._receiver)
        core.server.add(lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(service, server))

    async def start(self) -> None:
        await super().start()
        if self._doubts is not None:
            self._watching = asyncio.create_task(self._doubts.run())

    async def _stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await super()._stop()

    def _exhausted(self, reason: str) -> None:
        """The end of this process is the fence that its landing ring needs."""
        log.error("the decode worker drains and ends: %s", reason)
        self._core.spawn(self.leave(InternalError(reason)))

    def _status(self, status: WorkerStatus) -> WorkerStatus:
        role, stats, rings = self._role, self._receiver.stats, self._receiver.rings
        counts = stats.counts
        return replace(
            of_requests(status, role.attempts, role.admission, role.arrivals),
            handoffs=counts["committed"],
            handoffs_live=self._receiver.live,
            handoffs_aborted=counts["aborted"],
            handoffs_refused=counts["refused"],
            kv_bytes=counts["bytes"],
            parts=counts["parts"],
            digest_failures=counts["part_digest"],
            ring_slots=sum(len(ring.slots) for ring in rings),
            ring_free=sum(ring.count(SlotState.FREE) for ring in rings),
            ring_quarantined=sum(ring.count(SlotState.QUARANTINED) for ring in rings),
            transfer_rate_bytes_per_second=stats.rate_bytes_per_second,
        )


async def start(config: WorkerConfig) -> DecodeWorker:
    """Loads the model, then serves. Raises ModelError or ConfigError."""
    worker = DecodeWorker(config)
    await worker.start()
    return worker
