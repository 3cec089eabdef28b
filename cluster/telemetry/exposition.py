"""Metrics and probes over HTTP. OpenMetrics for scrapers that accept it, because only that format carries exemplars."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
import socketserver
import sys
import threading
import time
import wsgiref.simple_server
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, ThreadingWSGIServer, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from cluster.errors import ConfigError

log = logging.getLogger(__name__)
CONNECTION_SECONDS = 10.0  # Prometheus's default scrape timeout
MAX_CONNECTIONS = 64
BODY_SECONDS = 0.1  # ten renderings per second and format cost a fifth of the interpreter at most
OPEN_METRICS = "application/openmetrics-text"
# A probe returns the reasons against it; an empty list means yes. It runs on the server's threads and only reads.
Probe = Callable[[], Sequence[str]]
StartResponse = Callable[..., Any]
WsgiApp = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]


def encode(registry: Collector, accept: str) -> tuple[bytes, str]:
    """Return the text and its content type for a request's `Accept` header."""
    if accepts_open_metrics(accept):
        # Every name of Baton's is valid as it is. The library's default would replace the colon in vLLM's names.
        text: bytes = openmetrics.generate_latest(registry, escaping="allow-utf-8")  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def accepts_open_metrics(accept: str) -> bool:
    """By the media type alone: with the versions that clients name there would be any number of formats."""
    return any(one.partition(";")[0].strip() == OPEN_METRICS for one in accept.split(","))


class MetricsApp:
    """WSGI application that answers every path with the metrics, at most BODY_SECONDS old.

    The port needs no key, and rendering holds the interpreter lock: scrapes share a body, and one is rendered at a time.
    """

    def __init__(self, registry: Collector, clock: Callable[[], float] = time.monotonic):
        self._registry = registry
        self._clock = clock
        self._lock = threading.Lock()
        # By whether it is OpenMetrics: when it was rendered, the text, and its content type
        self._bodies: dict[bool, tuple[float, bytes, str]] = {}

    def _encode(self, accept: str) -> tuple[bytes, str]:
        which = accepts_open_metrics(accept)
        with self._lock:
            at, body, content_type = self._bodies.get(which, (-math.inf, b"", ""))
            if self._clock() - at >= BODY_SECONDS:
                body, content_type = encode(self._registry, accept)
                self._bodies[which] = self._clock(), body, content_type
        return body, content_type

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        body, content_type = self._encode(environ.get("HTTP_ACCEPT", ""))
        start_response("200 OK", [("Content-Type", content_type), ("Content-Length", str(len(body)))])
        return [body]


def probe_body(
    name: str, why_not: Sequence[str], facts: Mapping[str, str], warnings: Sequence[str] = ()
) -> bytes:
    """`{"ready": false, "why": ["the model is being loaded"], …}`; `warnings` only where there are any."""
    more = {"warnings": list(warnings)} if warnings else {}
    return json.dumps({name: not why_not, "why": list(why_not), **more, **facts}).encode()


class ProbeApp:
    """Answers `/ready` and `/live` with 200 or 503 and passes every other path on."""

    def __init__(
        self, rest: WsgiApp, probes: Mapping[str, Probe], facts: Mapping[str, str], warnings: Probe = tuple
    ):
        self._rest = rest
        self._probes = probes
        self._facts = facts
        self._warnings = warnings

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        name = environ.get("PATH_INFO", "").strip("/")
        probe = self._probes.get(name)
        if probe is None:
            return self._rest(environ, start_response)
        why_not = probe()
        body = probe_body(name, why_not, self._facts, self._warnings())
        status = "503 Service Unavailable" if why_not else "200 OK"
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]


class _Silent(wsgiref.simple_server.WSGIRequestHandler):
    """Logs no line for scrapes and probes, which would be most of the log."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingWSGIServer):
    """One thread per connection, ended after `CONNECTION_SECONDS`; IPv4 or IPv6.

    The port needs no key, so a silent or slow client must neither hold a thread for ever nor keep probes out.
    """

    def __init__(self, host: str, port: int):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # time of opening, oldest first
        super().__init__((host, port), _Silent)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = time.monotonic()
            if len(self._open) > MAX_CONNECTIONS:
                self._cut(next(iter(self._open)))
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections over their time; called twice a second and after each connection."""
        late = time.monotonic() - CONNECTION_SECONDS
        with self._lock:
            for connection in [one for one, since in self._open.items() if since < late]:
                self._cut(connection)

    def _cut(self, connection: socket.socket) -> None:
        """Shut a connection down, which ends its thread."""
        del self._open[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that ended early; log every other exception."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("a request to the metrics port failed", exc_info=error)

    def server_bind(self) -> None:
        # The library's own method resolves the host's name by DNS, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class MetricsServer:
    """Serves `/metrics`, `/ready` and `/live` over plain HTTP on its own threads, until `close`."""

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Collector | WsgiApp,
        probes: Mapping[str, Probe],
        facts: Mapping[str, str],
        warnings: Probe = tuple,
    ):
        """`metrics`: a registry, or what answers all paths but the probes'. Raises ConfigError if the port is taken."""
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise ConfigError(
                f"--metrics-port {port} on {host}: {error}; name a free one, or 0 for any",
                field="metrics_port",
            ) from error
        app = metrics if callable(metrics) else MetricsApp(metrics)
        self._server.set_app(ProbeApp(app, probes, facts, warnings))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.port = int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
