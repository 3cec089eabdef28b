"""The router's gRPC port.

gRPC for Python hands a server's calls to Python one by one, in the order of arrival: a flood of calls makes all others
wait, or gets them cancelled. So several servers listen on the port, each for a share of all addresses, and the kernel
gives all connections of an address to the same server: a flood delays only calls from addresses of the same share.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence

import grpc

from cluster import addresses
from cluster.config.router import RouterConfig
from cluster.errors import ConfigError
from cluster.rpc import connections, health
from cluster.rpc.compression import UNCOMPRESSED
from cluster.rpc.connections import FloodWatch, StallWatch, Watch
from cluster.rpc.health import Health
from cluster.rpc.pending_calls import pending_calls
from cluster.security.identity import Identity
from cluster.security.tls import listen
from router.frontends.grpc.gate import KeyInterceptor
from router.frontends.grpc.health_calls import HealthCalls
from router.frontends.grpc.reflection import ReflectionService
from router.frontends.grpc.service import SERVICE, InferenceService
from router.gateway import RequestGateway
from router.listening import (
    accepted_all,
    grpc_servers,
    own_listeners,
    refuse_connections,
    reserve_grpc,
    spread_by_address,
)

log = logging.getLogger(__name__)

EXTRA_STREAMS = 64
# Also with a lower max_concurrent_requests: calls beyond that are refused with a reason, not cancelled. A lower bound
# cancelled legitimate bursts and delayed other clients as much in a flood (measured in docs/security.md).
MIN_PENDING_CALLS = 1024


def grpc_options(config: RouterConfig) -> list[tuple[str, int]]:
    streams = config.max_concurrent_requests_per_connection or config.max_concurrent_requests
    options = [
        UNCOMPRESSED,
        ("grpc.max_receive_message_length", config.max_body_bytes),
        ("grpc.max_metadata_size", config.max_header_bytes),
        ("grpc.absolute_max_metadata_size", config.max_header_bytes),
        ("grpc.server_handshake_timeout_ms", math.ceil(config.header_seconds * 1000)),
        # The limit of metadata holds once the client has acknowledged it: until then gRPC takes 16 MiB for each call.
        ("grpc.http2.settings_timeout", math.ceil(config.header_seconds * 1000)),
        # Refusing takes a stream too: a few more than may be served.
        ("grpc.max_concurrent_streams", streams + EXTRA_STREAMS),
        *pending_calls(max(MIN_PENDING_CALLS, config.max_concurrent_requests)),
        ("grpc.max_allowed_incoming_connections", config.max_grpc_connections),
        ("grpc.max_connection_idle_ms", math.ceil(config.grpc_idle_seconds * 1000)),
        ("grpc.so_reuseport", int(config.processes > 1 or grpc_servers(config) > 1)),
        # Clients ping through silent streams to notice a router that is gone; without these two the server would
        # answer "too many pings" and hang up.
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    if config.max_connection_seconds:
        # The only way to move a client to another router without losing a request: GOAWAY first, and the connection ends
        # when its streams have ended. A server that stops sends GOAWAY too, but ends streams that cross it.
        options.append(("grpc.max_connection_age_ms", math.ceil(config.max_connection_seconds * 1000)))
        # No request lives longer; watches of health, and calls whose client does not read, do.
        grace = config.request_seconds + config.write_seconds
        options.append(("grpc.max_connection_age_grace_ms", int(grace * 1000)))
    return options


class GrpcEndpoint:
    def __init__(
        self, config: RouterConfig, gateway: RequestGateway, identity: Identity | None, *, ask_clients: bool
    ):
        self._config = config
        self._gateway = gateway
        self._identity = identity
        self._ask_clients = ask_clients
        interceptors = [
            *([KeyInterceptor(gateway)] if gateway.keys.on else ()),
            HealthCalls(config.write_seconds),
        ]
        self._servers = [
            grpc.aio.server(interceptors=interceptors, options=grpc_options(config))
            for _ in range(grpc_servers(config))
        ]
        self._port = config.grpc_port
        self._watches: Sequence[Watch] = ()
        self.health = Health(config.max_health_watchers, config.write_seconds)

    @property
    def address(self) -> str:
        return addresses.join(self._config.host, self._port)

    async def start(self) -> None:
        """Raises ConfigError where the port is not free."""
        handlers = (
            InferenceService(self._gateway).handler(),
            self.health.handler(),
            ReflectionService(self._gateway, (SERVICE, health.SERVICE)).handler(),
        )
        with contextlib.ExitStack() as until_bound:
            if len(self._servers) > 1:
                self._port = until_bound.enter_context(reserve_grpc(self._config)).getsockname()[1]
            for server in self._servers:
                server.add_generic_rpc_handlers(handlers)
                self._port = self._listen(server)
        if len(self._servers) > 1:
            self._spread()
        for server in self._servers:
            await server.start()
        self._watches = (
            FloodWatch(self._port, self._config.header_seconds),
            StallWatch(self._port, self._config.write_seconds),
        )
        for watch in self._watches:
            watch.start()

    def _listen(self, server: grpc.aio.Server) -> int:
        try:
            return listen(server, self.address, self._identity, ask_clients=self._ask_clients)
        except RuntimeError as error:
            raise ConfigError(
                f"--grpc-port: cannot listen on {self.address}: {error}", field="grpc_port"
            ) from error

    def _spread(self) -> None:
        listeners = own_listeners(self._port)  # more than one per server where the host has several addresses
        spread_by_address(listeners, "gRPC")
        for one in listeners:
            one.close()

    def show_ready(self, ready: bool) -> None:
        self.health.set({"": ready, SERVICE: ready})

    async def stop(self, seconds: float) -> None:
        """Take no new calls; those that run after `seconds` are ended, and then all connections."""
        await self._accept_last()
        try:
            await connections.stop(self._servers, self._port, seconds)
        finally:
            for watch in self._watches:
                watch.close()

    async def _accept_last(self) -> None:
        """Take no further connections, but accept those that wait: closing the port would reset them."""
        listeners = own_listeners(self._port) if self._port else []
        try:
            refuse_connections(listeners)
            await accepted_all(listeners)
        finally:
            for one in listeners:
                one.close()
