"""Starts a decode worker and its service. A BatonError ends a call (worker.server.TypedErrors)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from cluster.config.worker import WorkerConfig
from cluster.protocol.names import check_transfer_id
from decode_worker.quarantine_watch import ReportedPeerExits
from decode_worker.role import DecodeRole
from kv_transfer.contract import HandoffState
from wire import decode_pb2, decode_pb2_grpc, handoff_pb2
from worker.role import RoleParts
from worker.validate import check_call
from worker.worker import Worker, start_worker

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(decode_pb2_grpc.DecodeServicer):
    def __init__(self, parts: RoleParts, role: DecodeRole):
        self._parts = parts
        self._role = role
        self._exits = ReportedPeerExits(role.receiver)

    async def Run(
        self, request: decode_pb2.DecodeRunRequest, context: Context
    ) -> decode_pb2.DecodeRunResponse:
        check_call(request, self._parts.identity.worker_id)
        self._role.run(request)
        return decode_pb2.DecodeRunResponse()

    async def Abort(self, request: decode_pb2.AbortRequest, context: Context) -> decode_pb2.AbortResponse:
        check_transfer_id(request.transfer_id)
        self._role.check_abort(request)
        # Completed also if the router hangs up while it waits.
        state = await self._parts.background_tasks.complete(self._role.abort(request.transfer_id))
        committed = state is HandoffState.COMMITTED
        return decode_pb2.AbortResponse(
            state=decode_pb2.ATTEMPT_STATE_COMMITTED if committed else decode_pb2.ATTEMPT_STATE_ABORTED
        )

    async def Cancel(
        self, request: decode_pb2.DecodeCancelRequest, context: Context
    ) -> decode_pb2.DecodeCancelResponse:
        check_transfer_id(request.transfer_id)
        known = await self._role.cancel_by_router(request.transfer_id)
        return decode_pb2.DecodeCancelResponse(known=known)

    async def PeerExited(
        self, request: decode_pb2.PeerExitedRequest, context: Context
    ) -> decode_pb2.PeerExitedResponse:
        self._parts.background_tasks.spawn(self._exits.apply(request.worker_id))
        return decode_pb2.PeerExitedResponse()

    async def Handoff(
        self, request_iterator: AsyncIterator[handoff_pb2.PrefillToDecode], context: Context
    ) -> AsyncIterator[handoff_pb2.DecodeToPrefill]:
        async for reply in self._role.receiver.serve(request_iterator):
            yield reply


def make_role(parts: RoleParts) -> DecodeRole:
    """Raises SetupError."""
    role = DecodeRole(parts)
    service = DecodeService(parts, role)
    parts.server.add(lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(service, server))
    return role


async def start(config: WorkerConfig) -> Worker:
    """Load the model, then serve. Raises ModelError, ConfigError or SetupError."""
    return await start_worker(config, make_role)
