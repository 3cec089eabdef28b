"""A worker's gRPC server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cluster.addresses import join
from cluster.errors import BatonError, ConfigError, InvalidRequestError
from cluster.process.descriptors import free_for_connections, raised
from cluster.protocol.link import MAX_AGE_SECONDS
from cluster.rpc import connections, errors
from cluster.rpc.compression import UNCOMPRESSED
from cluster.rpc.health import Health
from cluster.rpc.message_size import MESSAGE_LIMITS
from cluster.rpc.pending_calls import pending_calls
from cluster.security.tls import Peers

MAX_HEALTH_WATCHERS = 256
# Routers and prefill workers keep one each. With TLS, the handshake ends others.
MAX_CONNECTIONS = 1024
HANDSHAKE_SECONDS = 10
# When a worker is lost, all routers may send its requests to the same other one at once.
PENDING_CALLS = 4096
# Then calls under way go on and new ones need another connection, for which certificates are checked again.
MAX_CONNECTION_SECONDS = MAX_AGE_SECONDS

OPTIONS: list[tuple[str, int]] = [
    UNCOMPRESSED,
    *MESSAGE_LIMITS,
    ("grpc.so_reuseport", 0),  # otherwise two workers on one port would share it silently
    # Routers and workers send pings on idle streams; without these options the server refuses them.
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
]
Context = grpc.aio.ServicerContext[Any, Any]


class TypedErrors(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends a call with the status and details of the BatonError that it raises.

    Messages are parsed inside the call: grpc.aio answers malformed ones with an exception and a wrong status. Here they
    end the call with INVALID_ARGUMENT; in a stream, after the messages before them.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        parse, write = handler.request_deserializer, handler.response_serializer
        call: Any = handler.unary_unary or handler.unary_stream or handler.stream_stream

        async def unary(raw: bytes, context: Context) -> Any:
            try:
                return await call(_parse(parse, raw), context)
            except BatonError as error:
                await errors.abort(context, error)

        async def stream(raw: Any, context: Context) -> AsyncIterator[Any]:
            try:
                request = _parse_all(parse, raw) if handler.request_streaming else _parse(parse, raw)
                async for reply in call(request, context):
                    yield reply
            except BatonError as error:
                await errors.abort(context, error)

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, write)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, None, write)
        return grpc.unary_unary_rpc_method_handler(unary, None, write)


async def _parse_all(parse: Any, messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for message in messages:
        yield _parse(parse, message)


def _parse(parse: Any, raw: bytes) -> Any:
    try:
        return parse(raw)
    except DecodeError as error:
        raise InvalidRequestError(f"the message is not valid protobuf: {error}", field="message") from None


class WorkerServer:
    """Serves a role's services and gRPC health on one port. Peers reach it at `advertised_host`."""

    def __init__(self, host: str, port: int, peers: Peers, advertised_host: str):
        most = min(MAX_CONNECTIONS, free_for_connections(raised()))
        self._server = grpc.aio.server(
            options=[
                *OPTIONS,
                *pending_calls(PENDING_CALLS),
                ("grpc.max_allowed_incoming_connections", most),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
                # HTTP/2's handshake: gRPC acknowledges settings as soon as it has received them.
                ("grpc.http2.settings_timeout", HANDSHAKE_SECONDS * 1000),
                ("grpc.max_connection_age_ms", int(MAX_CONNECTION_SECONDS * 1000)),
            ],
            interceptors=[*peers.interceptors, TypedErrors()],
        )
        self._peers = peers
        self._health = Health(MAX_HEALTH_WATCHERS)
        self._server.add_generic_rpc_handlers((self._health.handler(),))
        self._host = host
        self._advertised_host = advertised_host
        self._port = port

    @property
    def address(self) -> str:
        """The address that peers connect to."""
        return join(self._advertised_host, self._port)

    def add(self, register: Callable[[grpc.aio.Server], None]) -> None:
        register(self._server)

    def bind(self) -> None:
        """Open the port. Raises ConfigError if it is taken."""
        address = join(self._host, self._port)
        try:
            bound = self._peers.listen(self._server, address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}", field="port") from error
        self._port = bound

    async def start(self) -> None:
        await self._server.start()
        await self.set_serving(True)

    async def set_serving(self, serving: bool) -> None:
        self._health.set({"": serving})

    async def stop(self, grace_seconds: float) -> None:
        self._health.leave()
        await connections.stop([self._server], self._port, grace_seconds)
