"""Connections that ask for nothing, opened by somebody without a key, close neither door to others."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client import ClientTls
from baton.local.certs import make_certs
from cluster.config import RouterConfig
from router import descriptors
from router.grpc.other_calls import MAX_PER_CONNECTION
from tests.security.routers import KeyFile, Router, run_router, stub_workers, wait_ready
from tests.waiting import wait_for

CONNECTIONS = 30
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return {
        "max_http_connections": CONNECTIONS,
        "max_grpc_connections": CONNECTIONS,
        "idle_connection_seconds": 2.0,
        "header_seconds": 2.0,
    }


def ended(sock: socket.socket) -> bool:
    """Whether the router has closed the connection; what it has sent before is dropped."""
    sock.setblocking(False)
    try:
        while sock.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def asks(router: Router, key: str) -> int:
    body = {"prompt": "abc", "max_tokens": 2}
    answer = httpx.post(
        f"{router.http}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=30
    )
    return answer.status_code


def test_a_line_break_after_an_answer_keeps_no_connection(router: Router) -> None:
    with socket.create_connection(router.address, timeout=30) as sock:
        sock.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in sock.recv(4096)
        began = time.monotonic()
        while not ended(sock):
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"\r\n")
            assert time.monotonic() - began < 20, "line breaks keep it open"
            time.sleep(0.3)


def test_silent_connections_make_room_for_those_that_ask(router: Router, keys: KeyFile) -> None:
    key = keys.add("acme")
    wait_for(lambda: asks(router, key) == 200, 30, "the key is known")
    with contextlib.ExitStack() as stack:
        silent: list[socket.socket] = []
        for round_ in range(4):
            for _ in range(CONNECTIONS):
                sock = stack.enter_context(socket.create_connection(router.address, timeout=30))
                if round_ % 2:
                    sock.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
                silent.append(sock)
            assert asks(router, key) == 200
        wait_for(lambda: all(ended(sock) for sock in silent[: 3 * CONNECTIONS]), 30, "the oldest are closed")


def test_connections_without_a_handshake_count_too(
    checkpoint: Any, redis_server: Any, tmp_path: Path
) -> None:
    make_certs(tmp_path / "certs", [], 2)
    namespace = f"test-{secrets.token_hex(4)}"
    config = {
        "model": str(checkpoint("llama")),
        "redis_url": redis_server.url,
        "namespace": namespace,
        "tls_cert": str(tmp_path / "certs" / "router.pem"),
        "tls_key": str(tmp_path / "certs" / "router.key"),
        "max_http_connections": CONNECTIONS,
        "header_seconds": 2.0,
    }
    tls = ClientTls(tmp_path / "certs" / "ca.pem").context()
    with (
        stub_workers(redis_server.url, namespace),
        run_router(tmp_path / "router", config) as router,
        contextlib.ExitStack() as stack,
    ):
        wait_ready(router.http, verify=tls)
        began = time.monotonic()
        silent = [
            stack.enter_context(socket.create_connection(router.address, timeout=30))
            for _ in range(3 * CONNECTIONS)
        ]
        body = {"prompt": "abc", "max_tokens": 2}
        assert httpx.post(f"{router.http}/v1/completions", json=body, verify=tls).status_code == 200
        assert ended(silent[0])
        wait_for(lambda: all(map(ended, silent)), 20, "none outlives the handshake's time")
        assert time.monotonic() - began < 15


@contextlib.contextmanager
def raw_http2(router: Router) -> Iterator[socket.socket]:
    host, _, port = router.grpc.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(HTTP2_PREFACE)
        yield sock


def test_idle_grpc_connections_end_and_have_a_number(router: Router) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(raw_http2(router)) for _ in range(2 * CONNECTIONS)]
        wait_for(
            lambda: sum(map(ended, idle)) >= CONNECTIONS, 1.5, "those beyond the limit are closed at once"
        )
        wait_for(lambda: all(map(ended, idle)), 30, "none stays idle")
    with grpc.insecure_channel(router.grpc) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert check.status == health_pb2.HealthCheckResponse.SERVING


def test_health_watches_are_counted_and_names_bounded(router: Router) -> None:
    with grpc.insecure_channel(router.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_PER_CONNECTION)]
        assert all(next(watch).status for watch in watches)
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Watch(health_pb2.HealthCheckRequest()))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for watch in watches:
            watch.cancel()
        request = health_pb2.HealthCheckRequest()
        wait_for(lambda: stub.Check(request, timeout=30).status, 30, "places are given back")
        for call in (stub.Check, lambda request: next(stub.Watch(request))):
            with pytest.raises(grpc.RpcError) as caught:
                call(health_pb2.HealthCheckRequest(service="x" * 257))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_both_doors_share_the_descriptors_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RouterConfig(model=Path("m"), max_http_connections=3000, max_grpc_connections=1000)
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda *given: None)
    for hard, expected in ((20_000, (3000, 1000)), (4512, (3000, 1000)), (2512, (1500, 500)), (512, (1, 1))):
        monkeypatch.setattr(descriptors.resource, "getrlimit", lambda which, hard=hard: (256, hard))
        assert descriptors.most_connections(config) == expected
