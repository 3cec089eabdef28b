"""A worker's gRPC server."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from cluster.addresses import join
from cluster.errors import ConfigError
from cluster.process.descriptors import free_for_connections, raised
from cluster.rpc.health import Health
from cluster.security.tls import Peers
from worker.parse import ParseInside

# On the gRPC transport a part is one message; a prompt has 4 bytes per token.
MAX_MESSAGE_BYTES = 64 << 20
MAX_HEALTH_WATCHERS = 256
# Routers and prefill workers keep one each. With TLS, the handshake ends others.
MAX_CONNECTIONS = 1024
HANDSHAKE_SECONDS = 10

OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # otherwise two workers on one port would share it silently
    # Routers and workers send pings on idle streams; without these options the server refuses them.
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class WorkerServer:
    """Serves a role's services and gRPC health on one port. Peers reach it at `advertised_host`."""

    def __init__(self, host: str, port: int, peers: Peers, advertised_host: str):
        most = min(MAX_CONNECTIONS, free_for_connections(raised()))
        self._server = grpc.aio.server(
            options=[
                *OPTIONS,
                ("grpc.max_allowed_incoming_connections", most),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
            ],
            interceptors=[*peers.interceptors, ParseInside()],
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
        await self._server.stop(grace_seconds)
