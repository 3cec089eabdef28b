"""The Prefill service."""

from __future__ import annotations

from typing import Any

import grpc

from cluster.errors import BatonError
from cluster.protocol.wire_version import check_wire_version
from cluster.rpc import errors
from prefill_worker.role import PrefillRole
from wire import prefill_pb2, prefill_pb2_grpc
from worker.validate import check_name, check_transfer_id

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, role: PrefillRole, worker_id: str):
        self._role = role
        self._worker_id = worker_id

    async def Run(
        self, request: prefill_pb2.PrefillRunRequest, context: Context
    ) -> prefill_pb2.PrefillRunResponse:
        try:
            check_wire_version(request.wire_version, self._worker_id)
            check_transfer_id(request.transfer_id)
            check_name("request_id", request.request_id)
            self._role.open(request)
        except BatonError as error:
            await errors.abort(context, error)
        return prefill_pb2.PrefillRunResponse()

    async def Cancel(
        self, request: prefill_pb2.PrefillCancelRequest, context: Context
    ) -> prefill_pb2.PrefillCancelResponse:
        try:
            check_transfer_id(request.transfer_id)
        except BatonError as error:
            await errors.abort(context, error)
        known = await self._role.cancel_by_router(request.transfer_id)
        return prefill_pb2.PrefillCancelResponse(known=known)
