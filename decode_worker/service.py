"""The Decode service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from cluster.errors import BatonError
from cluster.protocol.wire_version import check_wire_version
from cluster.rpc import errors
from decode_worker.peer_exits import ReportedPeerExits
from decode_worker.role import DecodeRole
from kv_transfer.contract import HandoffState
from wire import decode_pb2, decode_pb2_grpc, handoff_pb2
from worker.role import RoleParts
from worker.validate import check_name, check_transfer_id

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(decode_pb2_grpc.DecodeServicer):
    def __init__(self, parts: RoleParts, role: DecodeRole):
        self._parts = parts
        self._role = role
        self._exits = ReportedPeerExits(role.receiver)

    async def Run(
        self, request: decode_pb2.DecodeRunRequest, context: Context
    ) -> decode_pb2.DecodeRunResponse:
        try:
            check_wire_version(request.wire_version, self._parts.identity.worker_id)
            check_transfer_id(request.transfer_id)
            check_name("request_id", request.request_id)
            self._role.run(request)
        except BatonError as error:
            await errors.abort(context, error)
        return decode_pb2.DecodeRunResponse()

    async def Abort(self, request: decode_pb2.AbortRequest, context: Context) -> decode_pb2.AbortResponse:
        await _check(request.transfer_id, context)
        try:
            self._role.check_abort(request)
        except BatonError as error:
            await errors.abort(context, error)
        # Completed also if the router hangs up while it waits.
        state = await self._parts.background_tasks.complete(self._role.abort(request.transfer_id))
        committed = state is HandoffState.COMMITTED
        return decode_pb2.AbortResponse(
            state=decode_pb2.ATTEMPT_STATE_COMMITTED if committed else decode_pb2.ATTEMPT_STATE_ABORTED
        )

    async def Cancel(
        self, request: decode_pb2.DecodeCancelRequest, context: Context
    ) -> decode_pb2.DecodeCancelResponse:
        await _check(request.transfer_id, context)
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
        try:
            async for reply in self._role.receiver.serve(request_iterator):
                yield reply
        except BatonError as error:
            await errors.abort(context, error)


async def _check(transfer_id: bytes, context: Context) -> None:
    try:
        check_transfer_id(transfer_id)
    except BatonError as error:
        await errors.abort(context, error)
