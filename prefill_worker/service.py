"""The Prefill service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from cluster.errors import BatonError
from cluster.protocol.wire_version import check_wire_version
from cluster.rpc import errors
from prefill_worker.role import PrefillRole
from wire import common_pb2, prefill_pb2, prefill_pb2_grpc
from worker.validate import check_name, check_transfer_id

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, role: PrefillRole, worker_id: str):
        self._role = role
        self._worker_id = worker_id

    async def Run(
        self, request: prefill_pb2.PrefillRunRequest, context: Context
    ) -> AsyncIterator[common_pb2.AttemptEvent]:
        try:
            check_wire_version(request.wire_version, self._worker_id)
            check_transfer_id(request.transfer_id)
            check_name("request_id", request.request_id)
            attempt = self._role.open(request)
        except BatonError as error:
            await errors.abort(context, error)
        async with contextlib.aclosing(self._role.attempts.read(attempt)) as events:
            async for event in events:
                yield event

    async def Cancel(
        self, request: prefill_pb2.PrefillCancelRequest, context: Context
    ) -> prefill_pb2.PrefillCancelResponse:
        try:
            check_transfer_id(request.transfer_id)
        except BatonError as error:
            await errors.abort(context, error)
        attempt = self._role.attempts.get(request.transfer_id)
        if attempt is None:
            self._role.attempts.remember_ended(request.transfer_id)
            return prefill_pb2.PrefillCancelResponse(known=False)
        await self._role.attempts.cancel(attempt)
        await self._role.freed(attempt)
        return prefill_pb2.PrefillCancelResponse(known=True)
