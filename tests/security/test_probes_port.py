"""The port of probes and metrics wants no key: it shows nothing but figures, and no client can hold it or its memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.telemetry import short_http
from cluster.telemetry.exposition import MetricsServer
from tests.harness.waiting import wait_for

LIMIT = 8


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsServer]:
    monkeypatch.setattr(short_http, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(short_http, "MAX_CONNECTIONS", LIMIT)
    made = MetricsServer("127.0.0.1", 0, CollectorRegistry(), {"ready": list, "live": list}, {"worker": "w"})
    yield made
    made.close()


def connect(server: MetricsServer, address: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30, source_address=(address, 0))


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
    many = b"".join(b"a%d: b\r\n" % number for number in range(2500))
    for head in (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n" + many + b"\r\n"):
        with connect(server) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(head)
            assert b"200" not in sock.recv(4096).split(b"\r\n", 1)[0]
    assert answers(server)


@pytest.mark.parametrize("addresses", [1, LIMIT - 1])
def test_a_flood_from_other_addresses_cuts_no_probe(addresses: int, server: MetricsServer) -> None:
    """However many connections come between the first byte of a probe and its last."""
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(connect(server))
        probe.sendall(b"GET /live HTTP/1.1\r\n")
        wait_for(lambda: len(server._server._open) == 1, 30, "it is accepted")
        flood = [
            stack.enter_context(connect(server, f"127.0.0.{2 + number % addresses}"))
            for number in range(5 * LIMIT)
        ]
        # Those of one address go in the order of arrival.
        assert all(ended(one) for one in flood[: -LIMIT - addresses])
        probe.sendall(b"host: x\r\n\r\n")
        assert b"200 OK" in probe.recv(4096)


def test_a_connection_is_closed_by_the_number_of_its_reads(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of a head that comes alone wakes the thread."""
    monkeypatch.setattr(short_http, "HEAD_READS", 3)
    with connect(server) as sock:
        for read in range(1, 3):
            sock.sendall(b"x")
            wait_for(
                lambda read=read: [one._reads for one in server._server._open] == [read], 30, "it is read"
            )
        sock.sendall(b"x")
        assert b"400 Bad Request" in sock.recv(4096)
        assert ended(sock)


class Hanging(Collector):
    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.times = 0

    def collect(self) -> Iterator[Metric]:
        self.times += 1
        assert self.go_on.wait(30)
        yield from ()


def test_scrapes_that_hang_hold_up_no_probe_and_leave_nothing_behind() -> None:
    hanging = Hanging()
    server = MetricsServer("127.0.0.1", 0, hanging, {"live": list}, {})
    with contextlib.ExitStack() as stack:
        scrapes = [stack.enter_context(connect(server)) for _ in range(2 * short_http.MAX_CONNECTIONS)]
        for one in scrapes:
            one.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert httpx.get(f"http://127.0.0.1:{server.port}/live", timeout=30).status_code == 200
        waiting = [one for exchanges in server._waiting.values() for one in exchanges]
        assert hanging.times == 1 and 0 < len(waiting) <= short_http.MAX_CONNECTIONS
        hanging.go_on.set()
        assert b"200 OK" in scrapes[-1].recv(4096)
        assert not server._waiting
    server.close()


def test_a_server_without_a_free_thread_goes_on(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with connect(server) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert b"500" in sock.recv(4096)
        assert answers(server)
    assert httpx.get(f"http://127.0.0.1:{server.port}/metrics", timeout=30).status_code == 200


def asked(server: MetricsServer, said: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer."""
    with connect(server) as sock:
        sock.sendall(said)
        answer = b""
        while data := sock.recv(65536):
            answer += data
    head, end, body = answer.partition(b"\r\n\r\n")
    assert end
    return head, body


def test_head_is_answered_as_get_without_the_body(server: MetricsServer) -> None:
    head, body = asked(server, b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
    assert body
    assert asked(server, b"HEAD /ready HTTP/1.1\r\nhost: x\r\n\r\n") == (head, b"")


def test_other_methods_are_refused_by_the_standards_status(server: MetricsServer) -> None:
    head, body = asked(server, b"POST /metrics HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc")
    assert head.startswith(b"HTTP/1.0 405 ") and b"\r\nAllow: GET, HEAD\r\n" in head and body
    head, body = asked(server, b"BREW /metrics HTTP/1.1\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 501 ") and body


def test_bytes_behind_the_head_do_not_reset_the_answer(server: MetricsServer) -> None:
    """Also those that arrive after it was sent: closing the socket would discard the answer at its client."""
    with connect(server) as sock:
        sock.sendall(b"POST /metrics HTTP/1.1\r\ncontent-length: 200000\r\n\r\n" + bytes(100_000))
        wait_for(lambda: [one._reads for one in server._server._open] != [0], 30, "it is answered")
        sock.sendall(bytes(100_000))
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.0 405 ")
    wait_for(lambda: not server._server._open, 30, "it is closed once the client has closed")


@pytest.mark.parametrize("limit", ["LINGER_SECONDS", "LINGER_READS"])
def test_a_client_that_does_not_close_after_its_answer_is_closed(
    limit: str, server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short_http, "LINGER_SECONDS", 0.1 if limit == "LINGER_SECONDS" else 600.0)
    monkeypatch.setattr(short_http, "LINGER_READS", 2)
    monkeypatch.setattr(short_http, "CONNECTION_SECONDS", 600.0)
    with connect(server) as sock:
        sock.sendall(b"GET /ready HTTP/1.1\r\n\r\n")
        assert ended(sock), "its answer has ended"
        if limit == "LINGER_READS":
            sock.sendall(b"x")
            wait_for(lambda: [one._reads for one in server._server._open] == [1], 30, "it is read")
            sock.sendall(b"x")
        wait_for(lambda: not server._server._open, 30, "it is closed")


def test_accepting_pauses_as_its_pace_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is tested in tests/cluster/test_accept_pace.py."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    class Pace:
        def pause_seconds(self) -> float | None:
            return 12345.0 if not pauses else None

    async def pause(seconds: float) -> None:
        if seconds > 1000:
            pauses.append(seconds)
            seconds = 0
        await sleep(seconds)

    monkeypatch.setattr(short_http, "AcceptPace", Pace)
    monkeypatch.setattr(asyncio, "sleep", pause)
    server = MetricsServer("127.0.0.1", 0, CollectorRegistry(), {"ready": list}, {})
    try:
        assert answers(server) and answers(server)
    finally:
        server.close()
    assert pauses == [12345.0]
