"""The decode worker decides whether an attempt has committed, where its prefill worker was lost."""

from __future__ import annotations

import asyncio

import grpc

from cluster import errors
from cluster.membership.types import WorkerInfo
from cluster.rpc import errors as rpc
from router.dispatch.channels import Channels
from wire import decode_pb2

CONTROL_SECONDS = 2.0


async def is_committed(
    channels: Channels, decode: WorkerInfo, transfer_id: bytes, decode_lost: asyncio.Event
) -> bool:
    """Whether `decode` has committed the attempt; if not, it never will. Raises BatonError when it does not answer, or is
    lost meanwhile: the prefill worker often loses it first, and its silence must not be waited for twice."""
    asking = asyncio.create_task(_abort(channels, decode, transfer_id))
    gone = asyncio.create_task(decode_lost.wait())
    try:
        await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise errors.PeerLostError("the decode worker was lost while it was asked how the attempt stands")
        return asking.result()
    finally:
        asking.cancel()
        gone.cancel()
        await asyncio.gather(asking, gone, return_exceptions=True)


async def _abort(channels: Channels, decode: WorkerInfo, transfer_id: bytes) -> bool:
    stub = channels.decode(decode.address, control=True)
    request = decode_pb2.AbortRequest(transfer_id=transfer_id, worker_epoch=decode.epoch)
    try:
        answer = await stub.Abort(request, timeout=CONTROL_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise rpc.error_from_rpc(error) from error
    return bool(answer.state == decode_pb2.ATTEMPT_STATE_COMMITTED)
