"""The gRPC stream from a prefill worker to a decode worker, with the queue of messages to send."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from cluster import errors
from cluster.faults.points import MessagePoint, inject
from cluster.rpc import errors as rpc
from kv_transfer.outbox import Outbox
from kv_transfer.prefill_side.check_replies import check_together
from wire import decode_pb2_grpc, handoff_pb2


@dataclass(eq=False)
class ControlStream:
    """Opens the stream, and begins it with `hello`.

    `on_message` is called for each message, on the event loop; a BatonError that it raises ends the stream. `on_end` is
    called with the reason when the stream ends or its queue is full.
    """

    name: str
    channel: grpc.aio.Channel
    hello: handoff_pb2.Hello
    at_message: MessagePoint
    on_message: Callable[[handoff_pb2.DecodeToPrefill], None]
    on_end: Callable[[errors.BatonError], None]

    def __post_init__(self) -> None:
        self.last_received = time.monotonic()
        self._outbox: Outbox[handoff_pb2.PrefillToDecode] = Outbox()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self.last_received

    def send(self, message: handoff_pb2.PrefillToDecode) -> None:
        """Queue a message."""
        fault = self.at_message(message.WhichOneof("message") or "", self.name)
        if fault is not None:
            inject(fault, lambda: self._put(message), asyncio.get_running_loop().call_later)
        else:
            self._put(message)

    def _put(self, message: handoff_pb2.PrefillToDecode) -> None:
        try:
            self._outbox.put(message)
        except asyncio.QueueFull:
            self.on_end(errors.PeerLostError(f"{self.name} does not read its messages"))

    def end(self) -> None:
        """Send what is queued, and nothing after it."""
        self._outbox.end()

    async def ended(self, seconds: float) -> None:
        """Wait for the call to end, and cancel it after `seconds`: a stopped peer would keep it and its channel open."""
        await asyncio.wait([self._task], timeout=seconds)
        self._task.cancel()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.channel.close(None)

    async def _run(self) -> None:
        call = decode_pb2_grpc.DecodeStub(self.channel).Handoff(self._outgoing())
        try:
            async for reply in call:
                self.last_received = time.monotonic()
                check_together(reply)
                for message in (reply, *reply.more):
                    self.on_message(message)
            self.on_end(errors.PeerLostError(f"{self.name} ended the stream"))
        except grpc.aio.AioRpcError as error:
            cause = rpc.error_from_rpc(error)
            handoff = isinstance(cause, errors.HandoffError)
            self.on_end(cause if handoff else errors.PeerLostError(f"{self.name}: {cause.message}"))
        except errors.BatonError as error:
            self.on_end(error)
        finally:
            call.cancel()
            self.on_end(errors.PeerLostError(f"{self.name}: the stream ended"))
            await self.channel.close(None)

    async def _outgoing(self) -> AsyncIterator[handoff_pb2.PrefillToDecode]:
        yield handoff_pb2.PrefillToDecode(hello=self.hello)
        while (message := await self._outbox.get()) is not None:
            yield message
