"""Metrics on a port of their own."""

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
from cluster.telemetry.exposition import MetricsApp
from cluster.telemetry.probes import Probe, ProbeApp

log = logging.getLogger(__name__)
CONNECTION_SECONDS = 10.0  # Prometheus gives a scrape as long
MAX_CONNECTIONS = 64


class _Silent(wsgiref.simple_server.WSGIRequestHandler):
    """A line for every scrape and probe would be most of the log."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingWSGIServer):
    """A thread a connection, which has `CONNECTION_SECONDS` for all it wants; either family of addresses.

    Who says nothing, or does not read, is cut off: a port without keys must not cost a thread for ever, nor keep
    probes out.
    """

    def __init__(self, host: str, port: int):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # since when, oldest first
        super().__init__((host, port), _Silent)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = time.monotonic()
            if len(self._open) > MAX_CONNECTIONS:
                self._cut(next(iter(self._open)))
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Twice a second, and after each connection."""
        late = time.monotonic() - CONNECTION_SECONDS
        with self._lock:
            for connection in [one for one, since in self._open.items() if since < late]:
                self._cut(connection)

    def _cut(self, connection: socket.socket) -> None:
        """Its thread wakes up and ends."""
        del self._open[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Somebody hung up, or was cut off: nothing to say. The applications answer for themselves."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("a request for metrics failed", exc_info=error)

    def server_bind(self) -> None:
        # The library's own asks DNS for the host's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class MetricsServer:
    """Serves a registry's `/metrics`, and `/ready` and `/live`, until `close`: plain HTTP, on threads of its own."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: Collector,
        probes: Mapping[str, Probe],
        facts: Mapping[str, str],
    ):
        """Raises ConfigError when the port is not to be had."""
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
