"""Bounds the calls of gRPC's health service while they wait for their clients.

They need no key, and take no place and nothing of the budget for bodies, which bound the calls of other services.
Without this, grpc.aio waits for a call's message, and until its answer is read, without a time limit, and its connection
does not count as idle.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import grpc

from cluster.errors import DeadlineError, InvalidRequestError, OverloadedError
from cluster.open_connections import OpenConnections
from cluster.sockets import network_of_call
from router.admission.admission import in_flight
from router.admission.shares import Share, Taken
from router.admission.tally import LocalTally
from router.frontends.grpc.gate import Context
from router.frontends.grpc.refusal import refusing

# These messages have a few bytes and arrive with the call, but gRPC accepts long ones. So only this many are read at a
# time, each within a short time. A further one ends another: calls that send nothing must not delay others.
READS = 32
READ_SECONDS = 1.0
# Answers have a few bytes, too: a client that reads them takes each at once.
UNREAD_ANSWERS = 256
CALLS_PER_CONNECTION = 16  # whose message has arrived
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
T = TypeVar("T")


class _Waits:
    """Waits of calls for their clients: each within a time, and only `most` at once; a further one ends the
    oldest of the address with the most."""

    def __init__(self, most: int, seconds: float, waiting_for: str):
        self._seconds = seconds
        self._waiting_for = waiting_for
        self._running: OpenConnections[asyncio.Timeout] = OpenConnections(most)

    async def result(self, wait: Awaitable[T], peer: str) -> T:
        """`peer`: the call's. Raises OverloadedError if it made room for others, DeadlineError if it was late."""
        deadline = asyncio.timeout(self._seconds)
        try:
            async with deadline:
                _end(self._running.add(deadline, network_of_call(peer)))
                return await wait
        except TimeoutError:
            if deadline not in self._running:
                most = self._running.limit
                many = f"more than {most} calls of these services wait for {self._waiting_for}; try again"
                raise OverloadedError(many, field="message", limit=str(most)) from None
            late = f"{self._waiting_for} did not happen within {self._seconds:g} s"
            raise DeadlineError(late, field="message", limit=f"{self._seconds:g} s") from None
        finally:
            self._running.discard(deadline)


def _end(wait: asyncio.Timeout | None) -> None:
    if wait is not None and not wait.expired():  # otherwise it is about to end
        wait.reschedule(asyncio.get_running_loop().time())


class HealthCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Serves calls with one message. Handlers from stream to stream read their messages themselves, within limits."""

    def __init__(self, write_seconds: float) -> None:
        """`write_seconds`: limit for the client to read the answer."""
        self._reads = _Waits(READS, READ_SECONDS, "the arrival of the call's message")
        self._writes = _Waits(UNREAD_ANSWERS, write_seconds, "the reading of the call's answer")
        self._connections = LocalTally()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        return grpc.stream_stream_rpc_method_handler(
            self._single(handler), handler.request_deserializer, handler.response_serializer
        )

    def _single(self, handler: Handler) -> Any:
        """Serve a call with one message as a stream, whose reading can be bounded. Clients see no difference."""

        async def single(messages: AsyncIterator[Any], context: Context) -> None:
            # A call that is given up before its answer was read lasts until its connection ends.
            with contextlib.ExitStack() as held:
                await refusing(partial(self._serve, handler, held))(messages, context)

        return single

    async def _serve(
        self, handler: Handler, held: contextlib.ExitStack, _: AsyncIterator[Any], context: Context
    ) -> None:
        call: Any = handler.unary_stream or handler.unary_unary
        peer = context.peer()
        message = await self._reads.result(context.read(), peer)
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise InvalidRequestError("message: the call has none", field="message")
        taken = Taken([Share(self._connections, peer, CALLS_PER_CONNECTION, in_flight("connection"))])
        taken.take(1)
        held.callback(taken.release)
        try:
            answer = await call(message, context)
            if not handler.response_streaming:
                await self._writes.result(context.write(answer), peer)
        except grpc.aio.InternalError:  # the client left without reading it
            raise asyncio.CancelledError from None
