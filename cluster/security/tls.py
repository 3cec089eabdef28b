"""TLS: every channel, every server's credentials and contexts.

Between Baton's processes TLS is mutual, and a certificate names a role, not an address: workers use any address, so a
channel to one verifies the name `worker.baton.internal`, and a worker's server checks the names of its callers
(`PeerNames`). Clients of the router's public ports verify its host name as usual.

Files are read again when they change: a server uses the new certificate for the next connection, a client for its next
channel. Requests that run are not affected. How long a connection outlives its certificate: docs/security.md, TLS.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from cluster.addresses import is_loopback
from cluster.errors import ConfigError
from cluster.security.identity import Identity, Pem, make_identity, no_password
from cluster.security.peer_names import WORKER_NAME, PeerNames

if TYPE_CHECKING:
    from cluster.config.worker import WorkerConfig

log = logging.getLogger(__name__)
# Options of every channel. By default gRPC waits a second or more after one failed attempt, even if the peer is back, and
# lets an attempt at a hanging peer take 20 s. Channels to one address with the same options share their attempts.
_RECONNECT: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Time for a connection attempt: long enough for a busy peer, short enough to leave a stopped one.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
# gRPC takes a proxy from the environment, for loopback addresses too.
_NO_PROXY = ("grpc.enable_http_proxy", 0)

Options = Sequence[tuple[str, Any]]


def server_credentials(identity: Identity, *, ask_clients: bool) -> grpc.ServerCredentials:
    """Credentials that use the newest files for each connection. `ask_clients`: require a certificate of the authority."""
    shown = identity.version

    def configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca or None)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        pem = identity.current()
        if identity.version == shown:
            return None
        shown = identity.version
        return configuration(pem)

    first = configuration(identity.current())
    # The type stubs omit that None means "no change".
    return grpc.dynamic_ssl_server_credentials(first, fetch, ask_clients)  # type: ignore[arg-type]


class Peers:
    """Channels and listeners between Baton's processes: mutual TLS, or plain text without an identity."""

    def __init__(self, identity: Identity | None = None):
        self.identity = identity

    @property
    def version(self) -> int:
        """A number that grows when the files change; channels should then be replaced."""
        if self.identity is None:
            return 0
        self.identity.current()
        return self.identity.version

    def channel(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        """Open a channel to a worker."""
        opened: grpc.aio.Channel = _open(grpc.aio, address, *self._to_worker(options))
        return opened

    def blocking_channel(self, address: str) -> grpc.Channel:
        """Open a blocking channel to a worker."""
        opened: grpc.Channel = _open(grpc, address, *self._to_worker(()))
        return opened

    def _to_worker(self, options: Options) -> tuple[grpc.ChannelCredentials | None, Options]:
        # `grpc_proxy` is meant for gRPC alone; http_proxy and https_proxy are set for whole machines
        if not os.environ.get("grpc_proxy"):  # noqa: SIM112 (its name in gRPC)
            options = (*options, _NO_PROXY)
        if self.identity is None:
            return None, options
        pem = self.identity.current()
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
        return credentials, (*options, ("grpc.ssl_target_name_override", WORKER_NAME))

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Bind the server to a port and return it. Raises RuntimeError if it is taken."""
        return listen(server, address, self.identity, ask_clients=True)

    def link_listener(self) -> ListenerContext | None:
        """The context of a worker's link port, for the connections of routers; None: plain text."""
        return ListenerContext(self.identity, ask_clients=True) if self.identity is not None else None

    def link_context(self) -> ssl.SSLContext | None:
        """A context with the newest files to open one link to a worker, with server_hostname=WORKER_NAME."""
        if self.identity is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.identity.current()
        self.identity.load_into(context)
        return context

    @property
    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:  # type: ignore[type-arg]
        return [PeerNames()] if self.identity is not None else []


def worker_peers(config: WorkerConfig) -> Peers:
    """Return the Peers of a worker's configuration. Raises ConfigError."""
    return Peers(make_identity(config.tls_cert, config.tls_key, config.tls_ca))


def listen(server: grpc.aio.Server, address: str, identity: Identity | None, *, ask_clients: bool) -> int:
    """Bind a port with TLS, or without if there is no identity. Raises RuntimeError if it is taken."""
    if identity is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, server_credentials(identity, ask_clients=ask_clients))


class _ServerContext(ssl.SSLContext):
    authority = b""  # that must have signed the certificates of its clients


class ListenerContext:
    """The SSLContext of a listener: a router's HTTP port, or a worker's link port. `refresh` makes the next connections
    use changed files.

    Each version of the files gets its own context, selected when a connection begins: files that do not load change
    nothing, and a removed authority is no longer trusted. A resumed session would bypass that. TLS 1.3 resumes none
    without tickets; 1.2 resumes from a cache of the first context, which Python cannot turn off, so clients that must
    present a certificate need 1.3.
    """

    def __init__(self, identity: Identity, *, ask_clients: bool):
        self._identity = identity
        self._ask_clients = ask_clients
        self._version = identity.version
        self._current = self._make()
        self.context: ssl.SSLContext = self._current
        self.context.sni_callback = self._select

    def refresh(self) -> bool:
        """Whether the files have changed and the next connection uses them."""
        self._identity.current()
        version = self._identity.version
        if version == self._version:
            return False
        try:
            self._current = self._make()
        except (OSError, ValueError) as error:  # half of a further change; the files are read again
            log.warning("certificate of a listener: %s; the previous one stays in use", error)
            return False
        self._version = version
        return True

    def trusts(self, transport: asyncio.BaseTransport) -> Callable[[], bool]:
        """Whether the client of a connection would be let in again: its certificate has not expired, and the authority is
        still the one of before."""
        connection = transport.get_extra_info("ssl_object")
        certificate = transport.get_extra_info("peercert") or {}
        authority = getattr(connection and connection.context, "authority", b"")
        ends = ssl.cert_time_to_seconds(certificate["notAfter"]) if certificate else math.inf
        return lambda: time.time() < ends and authority == self._current.authority

    def _make(self) -> _ServerContext:
        context = _ServerContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3 if self._ask_clients else ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED if self._ask_clients else ssl.CERT_NONE
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.authority = self._identity.current().ca  # first: a later one is another version
        self._identity.load_into(context)
        return context

    def _select(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Select the newest context; called for every connection, also without a server name."""
        connection.context = self._current


@dataclass(frozen=True)
class ClientTls:
    """A client's TLS settings: trusted authority (empty: the system's list), and its own certificate and key."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """gRPC credentials. Raises ConfigError if a file can't be read."""
        self.context()  # OpenSSL refuses here what gRPC would refuse only at each handshake, without a message
        try:
            ca, key, cert = (file.read_bytes() if file else None for file in (self.ca, self.key, self.cert))
        except OSError as error:
            raise self._unreadable(error) from error
        return grpc.ssl_channel_credentials(ca, key, cert)

    def context(self) -> ssl.SSLContext:
        """An SSLContext for HTTP clients. Raises ConfigError if a file can't be read, or one of certificate and key is
        missing."""
        if (self.cert is None) != (self.key is None):
            raise ConfigError("a certificate and its key belong together: give both", field="tls")
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise self._unreadable(error) from error
        return context

    def _unreadable(self, error: OSError | ValueError) -> ConfigError:
        names = ", ".join(str(file) for file in (self.ca, self.cert, self.key) if file is not None)
        return ConfigError(f"TLS files {names}: {getattr(error, 'strerror', None) or error}", field="tls")


def router_channel(address: str, tls: ClientTls | None, options: Options) -> grpc.Channel:
    """Open a blocking client's channel to a router. Only a router on another machine is reached by a proxy."""
    opened: grpc.Channel = _open(grpc, address, *_to_router(address, tls, options))
    return opened


def router_channel_async(address: str, tls: ClientTls | None, options: Options) -> grpc.aio.Channel:
    """Open an asyncio client's channel to a router. Only a router on another machine is reached by a proxy."""
    opened: grpc.aio.Channel = _open(grpc.aio, address, *_to_router(address, tls, options))
    return opened


def _to_router(
    address: str, tls: ClientTls | None, options: Options
) -> tuple[grpc.ChannelCredentials | None, Options]:
    host = address.rpartition(":")[0].rpartition("/")[2]  # of host:port and dns:///host:port
    if is_loopback(host):
        options = (*options, _NO_PROXY)
    return tls.credentials() if tls is not None else None, options


def _open(api: Any, address: str, credentials: grpc.ChannelCredentials | None, options: Options) -> Any:
    """Open a channel by `api`, which is grpc or grpc.aio; in plain text without credentials."""
    every = [*_RECONNECT, *options]
    if credentials is None:
        return api.insecure_channel(address, options=every)
    return api.secure_channel(address, credentials, options=every)
