"""TLS: the one place that makes channels and servers' credentials.

Between Baton's own processes it is mutual, and a certificate stands for a role, not for an address: workers come
and go on any address, so a channel to one asks for the name `worker.baton.internal`, and a worker's server asks
its callers for theirs (`PeerNames`). At the router's doors clients check the host they asked for, as everywhere.

Files are read again when they change: a server shows the new certificate to the next connection, a client takes
the new one into its next channel. Connections that stand go on as they were agreed.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from cluster.errors import ConfigError, ForbiddenError
from cluster.rpc import errors

if TYPE_CHECKING:
    from cluster.config.worker import WorkerConfig

log = logging.getLogger(__name__)
WORKER_NAME = "worker.baton.internal"
ROUTER_NAME = "router.baton.internal"
CHECK_SECONDS = 1.0
# Of every channel made here. gRPC's own defaults leave a living peer alone for a second and more after one failed
# attempt, and give an attempt at one that hangs 20 s. All channels to an address share their attempts, if their
# options are the same.
_RECONNECT: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long connecting may take before it counts as failed: a busy peer answers, a stopped one is left.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

Options = Sequence[tuple[str, Any]]
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Pem:
    """What the files hold. `ca` is empty where nobody's certificate is asked for."""

    cert: bytes
    key: bytes
    ca: bytes


class Identity:
    """A certificate, its key, and the authority whose certificates are accepted; newest readable files win.

    Raises ConfigError naming the file when they can't be used at the start. Safe to use from several threads:
    gRPC asks from its own.
    """

    def __init__(self, cert: Path, key: Path, ca: Path | None, clock: Callable[[], float] = time.monotonic):
        self._files = (cert, key, ca)
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = self._now_stamp()
        self._pem = self._read()
        self._checked = clock()
        self._logged: tuple[object, ...] | None = None  # stamp of the files whose failure was logged last
        self.generation = 1

    def current(self) -> Pem:
        """Looks at the files at most once a second."""
        with self._lock:
            now = self._clock()
            if now - self._checked >= CHECK_SECONDS:
                self._checked = now
                self._refresh()
            return self._pem

    def load_into(self, context: ssl.SSLContext) -> None:
        """Certificate, key and authority into a context, which may be in use."""
        cert, key, ca = self._files
        context.load_cert_chain(cert, key)
        if ca is not None:
            context.load_verify_locations(ca)

    def _refresh(self) -> None:
        stamp = self._now_stamp()
        if stamp == self._stamp:
            return
        try:
            pem = self._read()
        except ConfigError as error:
            # Half of a rotation, perhaps: certificate and key are two files. Looked at again next time.
            if stamp != self._logged:
                self._logged = stamp
                log.warning("%s; the certificate read before stays", error.message)
            return
        if stamp == self._now_stamp():
            self._stamp, self._pem = stamp, pem
            self.generation += 1
            log.info("certificate was read again: %s", self._files[0])

    def _read(self) -> Pem:
        cert, key, ca = self._files
        try:
            pem = Pem(cert.read_bytes(), key.read_bytes(), ca.read_bytes() if ca is not None else b"")
            # OpenSSL refuses here what gRPC would only refuse, silently, at every handshake.
            self.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            names = ", ".join(str(file) for file in self._files if file is not None)
            raise ConfigError(f"TLS files {names}: {error}", field="tls_cert") from None
        return pem

    def _now_stamp(self) -> tuple[object, ...]:
        return tuple(_stamp(file) for file in self._files if file is not None)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def make_identity(cert: Path | None, key: Path | None, ca: Path | None) -> Identity | None:
    """None where no certificate is configured. Raises ConfigError for half a configuration."""
    if (cert is None) != (key is None):
        raise ConfigError("tls_cert and tls_key belong together", field="tls_cert" if key else "tls_key")
    return Identity(cert, key, ca) if cert is not None and key is not None else None


def server_credentials(identity: Identity, *, ask_clients: bool) -> grpc.ServerCredentials:
    """Asks `identity` again for every connection. `ask_clients`: nobody without a certificate of its authority."""
    shown = identity.generation

    def configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca or None)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        pem = identity.current()
        if identity.generation == shown:
            return None
        shown = identity.generation
        return configuration(pem)

    first = configuration(identity.current())
    # The stubs do not know that None means "no change".
    return grpc.dynamic_ssl_server_credentials(first, fetch, ask_clients)  # type: ignore[arg-type]


class Peers:
    """How this process speaks with Baton's other processes: mutual TLS, or plain text without an identity."""

    def __init__(self, identity: Identity | None = None):
        self._identity = identity

    @property
    def generation(self) -> int:
        """Grows when the files change: then channels should be made anew."""
        if self._identity is None:
            return 0
        self._identity.current()
        return self._identity.generation

    def channel(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        """A channel to a worker."""
        if self._identity is None:
            return grpc.aio.insecure_channel(address, options=[*_RECONNECT, *options])
        return grpc.aio.secure_channel(
            address, self._credentials(self._identity), options=_to_worker(options)
        )

    def blocking_channel(self, address: str, options: Options = ()) -> grpc.Channel:
        """The same without an event loop."""
        if self._identity is None:
            return grpc.insecure_channel(address, options=[*_RECONNECT, *options])
        return grpc.secure_channel(address, self._credentials(self._identity), options=_to_worker(options))

    @staticmethod
    def _credentials(identity: Identity) -> grpc.ChannelCredentials:
        pem = identity.current()
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """The bound port; raises RuntimeError when it is not to be had."""
        return listen(server, address, self._identity, ask_clients=True)

    @property
    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:  # type: ignore[type-arg]
        return [PeerNames()] if self._identity is not None else []


def worker_peers(config: WorkerConfig) -> Peers:
    """Channels with a worker's certificate. Raises ConfigError."""
    return Peers(make_identity(config.tls_cert, config.tls_key, config.tls_ca))


def _to_worker(options: Options) -> list[tuple[str, Any]]:
    return [*_RECONNECT, *options, ("grpc.ssl_target_name_override", WORKER_NAME)]


def listen(server: grpc.aio.Server, address: str, identity: Identity | None, *, ask_clients: bool) -> int:
    """Opens a port with TLS, or without it where there is no identity. Raises RuntimeError when it is taken."""
    if identity is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, server_credentials(identity, ask_clients=ask_clients))


class PeerNames(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Who may call what at a worker: the hand-off stream is for workers, everything else for routers.

    That a certificate comes from the right authority the handshake has settled; this settles its role, so that
    one made for anything else by the same authority opens nothing.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc.health.v1."):
            return handler
        return _named(handler, WORKER_NAME if method.endswith("/Handoff") else ROUTER_NAME)


def _named(handler: grpc.RpcMethodHandler[Any, Any], name: str) -> grpc.RpcMethodHandler[Any, Any]:
    call: Any = handler.stream_stream or handler.unary_stream or handler.unary_unary
    forms = request, response = handler.request_deserializer, handler.response_serializer

    async def stream(given: Any, context: Context) -> AsyncIterator[Any]:
        await _check_name(context, name)
        async for message in call(given, context):
            yield message

    async def unary(given: Any, context: Context) -> Any:
        await _check_name(context, name)
        return await call(given, context)

    if not handler.response_streaming:
        return grpc.unary_unary_rpc_method_handler(unary, *forms)
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(stream, request, response)
    return grpc.unary_stream_rpc_method_handler(stream, request, response)


async def _check_name(context: Context, name: str) -> None:
    names: Any = context.auth_context().get("x509_subject_alternative_name", ())
    if name.encode() not in names:
        await errors.abort(context, ForbiddenError(f"only a certificate of {name} may call this"))


# --- the router's doors, and those who come to them ----------------------------------------------------------


class ListenerContext:
    """The SSLContext of an HTTP server, which it keeps. `refresh` makes the next connections use new files.

    Each generation of the files gets a context of its own, to which a connection is led as it begins: one that does
    not load spoils nothing, and an authority that is taken away is trusted no more. A resumed session would let in
    again whom an earlier generation had let in. TLS 1.3 resumes none without tickets; 1.2 resumes them from a cache of
    the first context, which Python cannot turn off, so clients that must show a certificate need 1.3.
    """

    def __init__(self, identity: Identity, *, ask_clients: bool):
        self._identity = identity
        self._ask_clients = ask_clients
        self._generation = identity.generation
        self.context = self._current = self._made()
        self.context.sni_callback = self._lead

    def refresh(self) -> None:
        self._identity.current()
        generation = self._identity.generation
        if generation == self._generation:
            return
        try:
            self._current = self._made()
        except (
            OSError,
            ValueError,
        ) as error:  # half of a further change: the files are read again at the next look
            log.warning("certificate for the HTTP door: %s; the one before stays", error)
            return
        self._generation = generation

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3 if self._ask_clients else ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED if self._ask_clients else ssl.CERT_NONE
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        self._identity.load_into(context)
        return context

    def _lead(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called for every connection, also for one that names no host."""
        connection.context = self._current


@dataclass(frozen=True)
class ClientTls:
    """What a client of the public doors brings: whom it trusts (empty: the system's list), and who it is."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ConfigError when a file can't be read."""
        try:
            ca, key, cert = (file.read_bytes() if file else None for file in (self.ca, self.key, self.cert))
        except OSError as error:
            raise ConfigError(f"TLS files: {error}", field="tls") from error
        return grpc.ssl_channel_credentials(ca, key, cert)

    def context(self) -> ssl.SSLContext:
        """The same for HTTP clients. Raises ConfigError."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            raise ConfigError(f"TLS files: {error}", field="tls") from error
        return context


def door_channel(address: str, tls: ClientTls | None, options: Options) -> grpc.Channel:
    """A blocking client's channel to a router."""
    if tls is None:
        return grpc.insecure_channel(address, options=[*_RECONNECT, *options])
    return grpc.secure_channel(address, tls.credentials(), options=[*_RECONNECT, *options])


def door_channel_async(address: str, tls: ClientTls | None, options: Options) -> grpc.aio.Channel:
    """An asyncio client's channel to a router."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=[*_RECONNECT, *options])
    return grpc.aio.secure_channel(address, tls.credentials(), options=[*_RECONNECT, *options])
