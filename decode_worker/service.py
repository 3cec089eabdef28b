"""The Decode service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from cluster.errors import BatonError
from cluster.protocol.wire_version import check_wire_version
from cluster.rpc import errors
from decode_worker.peer_exits import ReportedPeerExits
from decode_worker.role import DecodeRole
from kv_transfer.contract import HandoffState
from kv_transfer.decode_side.receiver import HandoffReceiver
from wire import common_pb2, decode_pb2, decode_pb2_grpc, handoff_pb2
from worker.core import WorkerCore
from worker.validate import check_name, check_transfer_id

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(decode_pb2_grpc.DecodeServicer):
    def __init__(self, core: WorkerCore, role: DecodeRole, receiver: HandoffReceiver):
        self._core = core
        self._role = role
        self._receiver = receiver
        self._exited = ReportedPeerExits(receiver)

    async def Attach(
        self, request: decode_pb2.AttachRequest, context: Context
    ) -> AsyncIterator[common_pb2.AttemptEvent]:
        try:
            check_wire_version(request.wire_version, self._core.worker_id)
            check_transfer_id(request.transfer_id)
            check_name("request_id", request.request_id)
            attempt = self._role.attach(request)
        except BatonError as error:
            await errors.abort(context, error)
        reading = self._role.attempts.read(attempt, request.from_position, lambda: self._role.resume(attempt))
        async with contextlib.aclosing(reading) as events:
            async for event in events:
                yield event

    async def Run(
        self, request: decode_pb2.DecodeRunRequest, context: Context
    ) -> AsyncIterator[common_pb2.AttemptEvent]:
        try:
            check_wire_version(request.wire_version, self._core.worker_id)
            check_transfer_id(request.transfer_id)
            check_name("request_id", request.request_id)
            attempt = self._role.run(request)
        except BatonError as error:
            await errors.abort(context, error)
        reading = self._role.attempts.read(attempt, 0, lambda: self._role.resume(attempt))
        async with contextlib.aclosing(reading) as events:
            async for event in events:
                yield event

    async def Abort(self, request: decode_pb2.AbortRequest, context: Context) -> decode_pb2.AbortResponse:
        await _checked(request.transfer_id, context)
        try:
            self._role.check_abort(request)
        except BatonError as error:
            await errors.abort(context, error)
        # A router that hangs up while it waits must not leave half of it done.
        state = await self._core.follow_ups.complete(self._role.abort(request.transfer_id))
        committed = state is HandoffState.COMMITTED
        return decode_pb2.AbortResponse(
            state=decode_pb2.ATTEMPT_STATE_COMMITTED if committed else decode_pb2.ATTEMPT_STATE_ABORTED
        )

    async def Cancel(
        self, request: decode_pb2.DecodeCancelRequest, context: Context
    ) -> decode_pb2.DecodeCancelResponse:
        await _checked(request.transfer_id, context)
        known = await self._role.cancel_by_router(request.transfer_id)
        return decode_pb2.DecodeCancelResponse(known=known)

    async def PeerExited(
        self, request: decode_pb2.PeerExitedRequest, context: Context
    ) -> decode_pb2.PeerExitedResponse:
        self._core.spawn(self._exited.apply(request.worker_id))
        return decode_pb2.PeerExitedResponse()

    async def Handoff(
        self, request_iterator: AsyncIterator[handoff_pb2.PrefillToDecode], context: Context
    ) -> AsyncIterator[handoff_pb2.DecodeToPrefill]:
        try:
            async for reply in self._receiver.serve(request_iterator):
                yield reply
        except BatonError as error:
            await errors.abort(context, error)


async def _checked(transfer_id: bytes, context: Context) -> None:
    try:
        check_transfer_id(transfer_id)
    except BatonError as error:
        await errors.abort(context, error)
