"""The metrics port."""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import sys
import threading
import time
import wsgiref.simple_server
from collections.abc import Mapping
from typing import Any

from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from cluster.errors import ConfigError
from cluster.telemetry.exposition import MetricsApp, Probe, ProbeApp

log = logging.getLogger(__name__)
CONNECTION_SECONDS = 10.0  # Prometheus's default scrape timeout
MAX_CONNECTIONS = 64


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
        registry: Collector,
        probes: Mapping[str, Probe],
        facts: Mapping[str, str],
    ):
        """Raises ConfigError if the port is taken."""
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise ConfigError(
                f"--metrics-port {port} on {host}: {error}; name a free one, or 0 for any",
                field="metrics_port",
            ) from error
        self._server.set_app(ProbeApp(MetricsApp(registry), probes, facts))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.port = int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
