"""grpc.health.v1, open to clients without a key: names, watchers and waiting calls are bounded.

The library's own servicer writes to a watcher while it holds the lock that status changes need, so a watcher that does
not read would block every change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2 as pb

from cluster.errors import BatonError, DeadlineError, InvalidRequestError, OverloadedError
from cluster.open_connections import OpenConnections
from cluster.rpc import errors
from cluster.sockets import network_of_call

SERVICE = "grpc.health.v1.Health"
MAX_NAME_CHARACTERS = 256
# gRPC takes far longer messages than the longest name needs; parsing one blocks the event loop.
MAX_MESSAGE_BYTES = 4 * MAX_NAME_CHARACTERS + 16
WRITE_SECONDS = 30.0
Context = grpc.aio.ServicerContext[Any, Any]


class Health:
    """Statuses by service name, and the streams that watch them."""

    def __init__(self, max_watchers: int, write_seconds: float = WRITE_SECONDS):
        """`write_seconds`: limit for a watcher to read a status."""
        self._write_seconds = write_seconds
        self._statuses: dict[str, int] = {"": pb.HealthCheckResponse.SERVING}
        self._changed = asyncio.Event()
        self._watchers: OpenConnections[asyncio.Task[Any]] = OpenConnections(max_watchers)
        self._leaving = False

    def set(self, statuses: Mapping[str, bool]) -> None:
        """Set whether services serve; no effect after `leave`."""
        if not self._leaving:
            self._update({name: _status(serving) for name, serving in statuses.items()})

    def leave(self) -> None:
        """Report every service as not serving from now on."""
        self._leaving = True
        self._update(dict.fromkeys(self._statuses, _status(False)))

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        write: Callable[[Any], bytes] = lambda message: message.SerializeToString()  # noqa: E731
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self.Check, None, write),
            "Watch": grpc.unary_stream_rpc_method_handler(self.Watch, None, write),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def Check(self, raw: bytes, context: Context) -> pb.HealthCheckResponse:
        with _ending_with_the_client():
            await _send_metadata(context)
            status = self._statuses.get(await _service(raw, context))
            if status is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return pb.HealthCheckResponse(status=status)

    async def Watch(self, raw: bytes, context: Context) -> None:
        """Stream a service's status; above the limit, the oldest watcher of the address with the most is ended."""
        with _ending_with_the_client():
            await _send_metadata(context)
            error = await self._watch(await _service(raw, context), context)
            # It waits for a client that does not read. No longer a watcher, the call is aborted only once.
            await errors.abort(context, error)

    async def _watch(self, service: str, context: Context) -> BatonError:
        """Send statuses until the call must end. Returns the reason."""
        task = asyncio.current_task()
        assert task is not None, "inside a call"
        excess = self._watchers.add(task, network_of_call(context.peer()))
        if excess is not None:
            excess.cancel()
        try:
            await self._send_statuses(service, context)
        except DeadlineError as error:
            return error
        except asyncio.CancelledError:
            if task in self._watchers:
                raise
            # grpc.aio would leave the call open without a status.
            task.uncancel()
            limit = str(self._watchers.limit)
            return OverloadedError(f"more than {limit} calls watch health", field="Watch", limit=limit)
        finally:
            self._watchers.discard(task)

    async def _send_statuses(self, service: str, context: Context) -> NoReturn:
        sent = None
        while True:
            changed, now = self._changed, self._statuses.get(service, pb.HealthCheckResponse.SERVICE_UNKNOWN)
            if now != sent:
                sent = now
                await self._write(pb.HealthCheckResponse(status=now), context)
            await changed.wait()

    async def _write(self, status: pb.HealthCheckResponse, context: Context) -> None:
        """Raises DeadlineError."""
        try:
            async with asyncio.timeout(self._write_seconds):
                await context.write(status)
        except TimeoutError:
            seconds = f"{self._write_seconds:g} s"
            late = f"the watcher read no status for {seconds}"
            raise DeadlineError(late, field="Watch", limit=seconds) from None

    def _update(self, statuses: Mapping[str, int]) -> None:
        if any(self._statuses.get(name) != status for name, status in statuses.items()):
            self._statuses.update(statuses)
            self._changed.set()
            self._changed = asyncio.Event()


def _status(serving: bool) -> int:
    status: int = pb.HealthCheckResponse.SERVING if serving else pb.HealthCheckResponse.NOT_SERVING
    return status


async def _send_metadata(context: Context) -> None:
    """Send it before a message: a status behind an unread message would repeat it, which gRPC refuses."""
    await context.send_initial_metadata(())


@contextlib.contextmanager
def _ending_with_the_client() -> Iterator[None]:
    try:
        yield
    except grpc.aio.InternalError:  # the client left without reading what was sent
        raise asyncio.CancelledError from None


async def _service(raw: bytes, context: Context) -> str:
    if len(raw) > MAX_MESSAGE_BYTES:
        await _refuse_name(context)
    try:
        service: str = pb.HealthCheckRequest.FromString(raw).service
    except DecodeError as error:
        malformed = f"the message is not valid protobuf: {error}"
        return await errors.abort(context, InvalidRequestError(malformed, field="message"))
    if len(service) > MAX_NAME_CHARACTERS:
        await _refuse_name(context)
    return service


async def _refuse_name(context: Context) -> NoReturn:
    limit = str(MAX_NAME_CHARACTERS)
    too_long = f"service: at most {limit} characters"
    await errors.abort(context, InvalidRequestError(too_long, field="service", limit=limit))
