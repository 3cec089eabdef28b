"""Connections to a gRPC port that fail in their TLS handshake write nothing to the log, which they could fill."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any

from tests.harness.router import run_router

CONNECTIONS = 50


def fail_handshake(port: int) -> None:
    """Returns when the router has closed the connection."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as peer,
        contextlib.suppress(ConnectionError),
    ):
        peer.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        while peer.recv(1000):
            pass


def test_failed_handshakes_write_no_lines(
    certs: Path, checkpoint: Any, redis_server: Any, tmp_path: Path
) -> None:
    config = {
        "model": str(checkpoint("llama")),
        "redis_url": redis_server.url,
        "namespace": "log-lines",
        "tls_cert": str(certs / "ours" / "router.pem"),
        "tls_key": str(certs / "ours" / "router.key"),
        "tls_ca": str(certs / "ours" / "ca.pem"),
    }
    with run_router(tmp_path, config) as router:
        port = int(router.grpc.rpartition(":")[2])
        for _ in range(CONNECTIONS):
            fail_handshake(port)
        lines = router.log.read_text().splitlines()
    ours = [line for line in lines if line.startswith("{") and json.loads(line)]
    assert len(lines) - len(ours) <= 1, "the line with the addresses, and none for a connection"
