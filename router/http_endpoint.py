"""The router's HTTP port."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import uvicorn

from cluster import addresses
from cluster.config.router import RouterConfig
from cluster.security.identity import Identity
from cluster.security.tls import ListenerContext
from router.admission.descriptors import max_silent
from router.frontends.http.app import Generation, build_routes
from router.frontends.http.connection.exchange import Endpoint, Exchange
from router.frontends.http.connection.listener import HttpServer
from router.frontends.http.connection.protocol import limited
from router.frontends.http.cors import Cors
from router.frontends.http.errors import failure_response
from router.frontends.http.gate import Gate
from router.frontends.http.serving import id_of_failed
from router.gateway import RequestGateway
from router.listening import listen_http
from router.processes.http import SharedHttpServer, counted
from router.processes.member import Member

GRACE_SECONDS = 5.0


class HttpEndpoint:
    """Listens from construction on; connections are served by `serve`. Raises ConfigError where the port is not free."""

    def __init__(
        self,
        config: RouterConfig,
        gateway: RequestGateway,
        identity: Identity | None,
        *,
        ask_clients: bool,
        member: Member | None = None,
    ):
        """`member`: of the router's processes, all of which accept from the same sockets."""
        self._host = config.host
        self._context = ListenerContext(identity, ask_clients=ask_clients) if identity is not None else None
        self._listeners = listen_http(config) if member is None else member.http_listeners
        routes = build_routes(gateway)
        gate = Gate(routes.app, gateway)
        cors = Cors(gate, config.cors_origins) if config.cors_origins else None
        protocol = limited(
            config,
            {key: _direct(one, gate, cors) for key, one in routes.generations.items()},
            lambda: gateway.draining,
            *((self._context.trusts,) if self._context is not None else ()),
        )
        uvicorn_config = uvicorn.Config(
            cors or gate,
            http=protocol if member is None else counted(protocol, member),
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # the client's address is not used
            lifespan="off",
            timeout_graceful_shutdown=int(GRACE_SECONDS),
            ssl_context_factory=self._ssl_context if self._context is not None else None,
        )
        opening = config.header_seconds, max_silent(config.max_http_connections), gateway.keys
        self._server = (
            HttpServer(uvicorn_config, *opening)
            if member is None
            else SharedHttpServer(uvicorn_config, member, *opening)
        )

    @property
    def url(self) -> str:
        scheme = "http" if self._context is None else "https"
        return f"{scheme}://{addresses.join(self._host, self._listeners[0].getsockname()[1])}"

    @property
    def connections(self) -> list[str]:
        """Clients' addresses of the open connections."""
        clients = [one.client for one in self._server.server_state.connections]  # type: ignore[union-attr]
        return [f"{client[0]}:{client[1]}" for client in clients if client]  # as connection_of names them

    async def serve(self) -> None:
        """Serve until `stop`."""
        await self._server.serve(sockets=self._listeners)

    async def accept_last(self) -> None:
        """Take no further connections, but serve those that wait to be accepted."""
        if self._listeners[0].fileno() >= 0:
            await self._server.accept_last(self._listeners)

    async def close_port(self) -> None:
        """Also for processes that share it; without effect once it is closed. Open connections are served until `stop`."""
        if self._listeners[0].fileno() >= 0:
            await self._server.close_port(self._listeners)

    def stop(self) -> None:
        self._server.should_exit = True

    def refresh(self) -> None:
        """Read certificate files that have changed."""
        if self._context is not None:
            self._context.refresh()

    def _ssl_context(self, config: uvicorn.Config, default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        assert self._context is not None
        return self._context.context


def _direct(generation: Generation, gate: Gate, cors: Cors | None) -> Endpoint:
    """The endpoint behind the layers of the ASGI application."""

    async def answer(exchange: Exchange) -> None:
        if cors is not None:
            exchange.add_headers(await cors.headers_for(exchange.headers))
        try:
            response = await gate.refusal(exchange.scope) or await generation(exchange)
        except Exception as error:
            response = failure_response(error, exchange.url.path)
        if response is not None:
            if "x-request-id" not in response.headers and (shown := id_of_failed(exchange)):
                response.headers["x-request-id"] = shown
            await exchange.send(response)

    return answer
