"""A running router: both doors over one bundle of services."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable

import grpc
import uvicorn

from cluster.config.router import RouterConfig
from cluster.errors import ConfigError
from cluster.membership.reader import Members
from cluster.rpc import health
from cluster.rpc.health import Health
from cluster.security.key_file import ApiKeys
from cluster.security.tls import ListenerContext, Peers, listen, make_identity
from cluster.telemetry.exporter import MetricsServer
from cluster.telemetry.loop_lag import LoopLag
from cluster.telemetry.registry import Registry
from cluster.telemetry.tracing.setup import open_tracing
from router.admission.descriptors import max_silent, within_descriptors
from router.dispatch.channels import Channels
from router.dispatch.services import Services
from router.frontends.grpc.gate import KeyInterceptor
from router.frontends.grpc.other_calls import OtherCalls
from router.frontends.grpc.reflection import ReflectionService
from router.frontends.grpc.service import SERVICE, InferenceService
from router.frontends.http.app import build_app
from router.frontends.http.cors import with_cors
from router.frontends.http.gate import Gate
from router.frontends.http.listener import HttpServer
from router.frontends.http.protocol import HttpLimits, limited
from router.gateway import RequestGateway
from router.heap import return_long_blocks
from router.observe import cluster
from router.observe.requests import RouterMetrics
from router.placement.placement import Placement
from router.quota.quota import Quota
from router.text.tokenizer import ModelText

GRACE_SECONDS = 5.0
EXTRA_STREAMS = 64
LOOK_SECONDS = 0.02
QUIET_SECONDS = 0.5
log = logging.getLogger(__name__)
STALL_SECONDS = 30.0  # without a turn of the loop for so long, a router is dead
# Connections not yet accepted, as far as net.core.somaxconn allows: a client that meets a full backlog waits a second.
BACKLOG = 4096
SEND_BUFFER_BYTES = 256 << 10
# Python's default scans the objects of every stream after each 700 new ones, and as few objects are left after the freeze,
# it makes full collections often. Few objects here are in cycles: collecting them this late costs some MiB.
GC_THRESHOLDS = (20_000, 20, 50)


def _grpc_options(config: RouterConfig) -> list[tuple[str, int]]:
    streams = config.max_concurrent_requests_per_connection or config.max_concurrent_requests
    options = [
        ("grpc.max_receive_message_length", config.max_body_bytes),
        ("grpc.max_metadata_size", config.max_header_bytes),
        ("grpc.absolute_max_metadata_size", config.max_header_bytes),
        ("grpc.server_handshake_timeout_ms", math.ceil(config.header_seconds * 1000)),
        # Refusing takes a stream too: a few more than may be served.
        ("grpc.max_concurrent_streams", streams + EXTRA_STREAMS),
        ("grpc.max_allowed_incoming_connections", config.max_grpc_connections),
        ("grpc.max_connection_idle_ms", math.ceil(config.grpc_idle_seconds * 1000)),
        ("grpc.so_reuseport", 0),
        # Clients ping through silent streams to notice a router that is gone; without these two the server would
        # answer "too many pings" and hang up.
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    if config.max_connection_seconds:
        # The one way to send a client elsewhere without a request lost: GOAWAY first, and the connection ends once
        # its streams have. A server that stops says GOAWAY too, but ends what crosses with it.
        options.append(("grpc.max_connection_age_ms", math.ceil(config.max_connection_seconds * 1000)))
        # No request lives longer; watches of health and calls that nobody reads do.
        grace = config.request_seconds + config.write_seconds
        options.append(("grpc.max_connection_age_grace_ms", int(grace * 1000)))
    return options


class Router:
    """`start`, then serve until `close`. Raises ConfigError or ModelError before it listens."""

    def __init__(self, config: RouterConfig):
        self._config = config = within_descriptors(config)
        self._text = ModelText(config.model)
        self._members = Members(config.redis_url, config.namespace)
        self._placement = Placement(config, self._members)
        inside = make_identity(config.tls_cert, config.tls_key, config.tls_ca)
        self._door = make_identity(
            config.door_tls_cert or config.tls_cert,
            config.door_tls_key or config.tls_key,
            config.tls_client_ca,
        )
        self._ask_clients = config.tls_client_ca is not None
        self._door_context = (
            ListenerContext(self._door, ask_clients=self._ask_clients) if self._door is not None else None
        )
        self._channels = Channels(Peers(inside if config.tls_ca else None))
        self._registry = registry = Registry(
            aliases=config.metrics_aliases, model=config.served_model_name or config.model.name
        )
        self._loop_lag = LoopLag()
        self._quota = Quota(config.redis_url, config.namespace, registry)
        self._services = Services(
            config, self._text, self._members, self._placement, self._channels, self._quota
        )
        self._services.tracing = open_tracing(config, "baton-router", config.router_id)
        registry.add(cluster.collectors(self._services, self._loop_lag.seconds))
        self._keys = ApiKeys(config.api_keys_file)
        self.gateway = RequestGateway(self._services, RouterMetrics(registry), self._keys)
        self._grpc = grpc.aio.server(
            interceptors=[
                *([KeyInterceptor(self.gateway)] if self._keys.on else ()),
                OtherCalls(),
            ],
            options=_grpc_options(config),
        )
        self._health = Health(config.max_health_watchers)
        self._socket = self._listen()
        self._http = HttpServer(
            uvicorn.Config(
                with_cors(Gate(build_app(self.gateway), self.gateway), config.cors_origins),
                http=limited(HttpLimits.of(config)),
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # nothing here asks who the client is
                lifespan="off",
                timeout_graceful_shutdown=int(GRACE_SECONDS),
                ssl_context_factory=self._ssl_context if self._door_context is not None else None,
            ),
            config.header_seconds,
            max_silent(config.max_http_connections),
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._grpc_port = 0
        self._turned = time.monotonic()
        self._metrics: MetricsServer | None = None

    @property
    def http_url(self) -> str:
        scheme = "http" if self._door is None else "https"
        return f"{scheme}://{self._config.host}:{self._socket.getsockname()[1]}"

    @property
    def grpc_address(self) -> str:
        return f"{self._config.host}:{self._grpc_port}"

    @property
    def metrics_address(self) -> str:
        """Empty where metrics are only at the HTTP door."""
        return f"{self._config.host}:{self._metrics.port}" if self._metrics is not None else ""

    def _ssl_context(self, config: uvicorn.Config, default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        assert self._door_context is not None
        return self._door_context.context

    def _listen(self) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it: a first streamed byte must not wait for Nagle.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # So does this one: what a client leaves unread must stop its request soon, not fill megabytes of kernel.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        try:
            sock.bind((self._config.host, self._config.http_port))
            sock.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"--http-port {self._config.http_port} on {self._config.host}: {error}", field="http_port"
            ) from error
        return sock

    async def start(self) -> None:
        await self._members.start()
        await self._placement.start()
        self.gateway.live.start()
        services = (SERVICE, health.SERVICE)
        self._grpc.add_generic_rpc_handlers(
            (
                InferenceService(self.gateway).handler(),
                self._health.handler(),
                ReflectionService(self.gateway, services).handler(),
            )
        )
        address = f"{self._config.host}:{self._config.grpc_port}"
        try:
            self._grpc_port = listen(self._grpc, address, self._door, ask_clients=self._ask_clients)
        except RuntimeError as error:
            raise ConfigError(
                f"--grpc-port: cannot listen on {address}: {error}", field="grpc_port"
            ) from error
        await self._grpc.start()
        self._loop_lag.start()
        self._open_metrics()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._serve_http()),
            loop.create_task(self._watch()),
        ]
        # What is there by now stays as long as the process: about 100,000 objects, and a full collection that looked
        # at them all would hold every stream for 50 ms.
        return_long_blocks()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)

    def _open_metrics(self) -> None:
        config = self._config
        if config.metrics_port is not None:
            probes = {"ready": self.gateway.why_not_ready, "live": self._why_not_live}
            facts = {"router": config.router_id}
            self._metrics = MetricsServer(config.host, config.metrics_port, self._registry, probes, facts)

    def _why_not_live(self) -> list[str]:
        """Asked on the probes' threads, which go on when the loop that serves stands still."""
        silent = time.monotonic() - self._turned
        return [f"the event loop has stood still for {silent:.0f} s"] if silent > STALL_SECONDS else []

    async def _serve_http(self) -> None:
        # uvicorn installs its own signal handlers, and raises what it caught again at its end: the process is ours.
        self._http.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        await self._http.serve(sockets=[self._socket])

    async def _watch(self) -> None:
        """Health follows readiness; connections to workers that are gone are closed."""
        while True:
            self._turned = time.monotonic()
            try:
                await self._look_after_all()
            except Exception:  # what fails once must not stay unseen for ever: revoked keys, for one
                log.exception("health, connections or files could not be looked after; they are again")
            await asyncio.sleep(0.5)

    async def _look_after_all(self) -> None:
        self._health.set(dict.fromkeys(("", SERVICE), self.gateway.ready()))
        self._channels.keep_only({worker.address for worker in self._members.all})
        await asyncio.to_thread(self._refresh)

    def _refresh(self) -> None:
        """Files that may have changed: keys and certificates."""
        self._keys.refresh()
        if self._door_context is not None:
            self._door_context.refresh()

    async def drain(self) -> None:
        """Not ready at once; after a moment for load balancers to notice, nothing new is taken but what comes on open
        HTTP connections. Returns when all has finished, or the drain limit is over."""
        self.gateway.leave()
        self._health.leave()
        await asyncio.sleep(self._config.drain_delay_seconds)
        self.gateway.refuse_new(but=self._http_connections())
        deadline = time.monotonic() + self._config.drain_seconds
        stopping = asyncio.create_task(self._grpc.stop(self._config.drain_seconds))
        quiet = 0.0
        while (self.gateway.in_flight or quiet < self._quiet_seconds()) and time.monotonic() < deadline:
            quiet = 0.0 if self.gateway.in_flight else quiet + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)

    def _http_connections(self) -> list[str]:
        open_ones = self._http.server_state.connections
        return [f"{one.client[0]}:{one.client[1]}" for one in open_ones if one.client]  # type: ignore[union-attr]

    def _quiet_seconds(self) -> float:
        """Who has just read the end of an answer may send its next request at once."""
        return QUIET_SECONDS if self._http.server_state.connections else 0.0

    async def close(self) -> None:
        """Drains, then listens no more and ends what is left."""
        await self.drain()
        self._http.should_exit = True
        await self._grpc.stop(GRACE_SECONDS)
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._services.finish(GRACE_SECONDS)
        await self.gateway.live.close()
        await self._channels.close()
        await self._placement.close()
        await self._quota.close()
        await self._members.close()
        self._loop_lag.stop()
        if self._services.tracing is not None:
            await asyncio.to_thread(self._services.tracing.close)
        self._text.close()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
