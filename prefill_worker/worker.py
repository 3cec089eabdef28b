"""Starts a prefill worker and its service. A BatonError ends a call (worker.server.TypedErrors)."""

from __future__ import annotations

from typing import Any

import grpc

from cluster.config.worker import WorkerConfig
from cluster.protocol.names import check_transfer_id
from kv_transfer.prefill_side.sender import HandoffSender
from prefill_worker.role import PrefillRole
from wire import prefill_pb2, prefill_pb2_grpc
from worker.role import RoleParts
from worker.validate import check_call
from worker.worker import Worker, start_worker

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, role: PrefillRole, worker_id: str):
        self._role = role
        self._worker_id = worker_id

    async def Run(
        self, request: prefill_pb2.PrefillRunRequest, context: Context
    ) -> prefill_pb2.PrefillRunResponse:
        check_call(request, self._worker_id)
        self._role.open(request)
        return prefill_pb2.PrefillRunResponse()

    async def Cancel(
        self, request: prefill_pb2.PrefillCancelRequest, context: Context
    ) -> prefill_pb2.PrefillCancelResponse:
        check_transfer_id(request.transfer_id)
        known = await self._role.cancel_by_router(request.transfer_id)
        return prefill_pb2.PrefillCancelResponse(known=known)


def make_role(parts: RoleParts) -> PrefillRole:
    sender = HandoffSender(
        worker=parts.identity.ref,
        layout=parts.identity.layout,
        ranks=parts.ranks.endpoints,
        config=parts.config.transfer,
        peers=parts.peers,
        on_failed=parts.fail,
        faults=parts.faults,
    )
    role = PrefillRole(parts, sender)
    service = PrefillService(role, parts.identity.worker_id)
    parts.server.add(lambda server: prefill_pb2_grpc.add_PrefillServicer_to_server(service, server))
    return role


async def start(config: WorkerConfig) -> Worker:
    """Load the model, then serve. Raises ModelError, ConfigError or SetupError."""
    return await start_worker(config, make_role)
