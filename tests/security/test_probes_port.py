"""The port of probes and metrics wants no key: it shows nothing but figures, and no client can hold it or its memory."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry

from cluster.telemetry import exposition
from cluster.telemetry.exposition import MetricsServer
from tests.harness.waiting import wait_for


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsServer]:
    monkeypatch.setattr(exposition, "CONNECTION_SECONDS", 1.0)
    monkeypatch.setattr(exposition, "MAX_CONNECTIONS", 8)
    made = MetricsServer("127.0.0.1", 0, CollectorRegistry(), {"ready": list, "live": list}, {"worker": "w"})
    yield made
    made.close()


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def ended(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass
    return True


def answers(server: MetricsServer) -> bool:
    return httpx.get(f"http://127.0.0.1:{server.port}/ready", timeout=30).status_code == 200


@pytest.mark.parametrize("said", [b"", b"GET /met", b"GET /metrics HTTP/1.1\r\nhost: x\r\na: "])
def test_a_client_that_does_not_finish_its_request_is_disconnected(
    said: bytes, server: MetricsServer
) -> None:
    with connect(server) as sock:
        sock.sendall(said)
        assert ended(sock), "within its time, or the read above would"
    assert answers(server)


def test_a_client_that_trickles_is_disconnected_all_the_same(server: MetricsServer) -> None:
    with connect(server) as sock:
        sock.settimeout(0.1)
        sock.sendall(b"GET /metrics HTTP/1.1\r\na: ")

        def cut() -> bool:
            try:
                sock.sendall(b"x")
                return sock.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        wait_for(cut, 30, "cut off")


def test_a_crowd_does_not_keep_probes_out(server: MetricsServer) -> None:
    """Many more than it has places for; nothing is left of them afterwards."""
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(connect(server)) for _ in range(40)]
        assert answers(server), "while all of them are there"
        assert all(ended(sock) for sock in crowd)
    wait_for(lambda: not server._server._open, 30, "nothing is kept of them")


def test_heads_have_a_size(server: MetricsServer) -> None:
    many = b"".join(b"a%d: b\r\n" % number for number in range(500))
    for head in (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n" + many + b"\r\n"):
        with connect(server) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(head)
            assert b"200" not in sock.recv(4096).split(b"\r\n", 1)[0]
    assert answers(server)
