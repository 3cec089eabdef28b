"""A client whose authority was removed is refused on every port, also with an earlier TLS session."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.router import run_router
from tests.harness.waiting import wait_for
from tests.security.attacks.grpc_frames import GREETING
from tests.security.identities import client_tls


@pytest.fixture
def asking(certs: Path, checkpoint: Any, redis_server: Any, tmp_path: Path) -> Iterator[Any]:
    """A router that asks for client certificates, and the directory of its files."""
    live = tmp_path / "live"
    shutil.copytree(certs / "ours", live)
    config = {
        "model": str(checkpoint("llama")),
        "redis_url": redis_server.url,
        "namespace": "removed-authority",
        "tls_cert": str(live / "router.pem"),
        "tls_key": str(live / "router.key"),
        "tls_ca": str(live / "ca.pem"),
        "tls_client_ca": str(live / "client-ca.pem"),
    }
    with run_router(tmp_path / "router", config) as running:
        yield running, live


def open_one(
    router: Any, port: str, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> ssl.SSLSession | None:
    """Its session, after a connection that ended cleanly: OpenSSL forgets sessions of others. Raises OSError if the
    server refuses."""
    address = router.address if port == "http" else ("127.0.0.1", int(router.grpc.rsplit(":", 1)[1]))
    greeting = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    if port == "grpc":
        greeting = GREETING
    with (
        socket.create_connection(address, timeout=20) as sock,
        context.wrap_socket(sock, server_hostname="localhost", session=session) as wrapped,
    ):
        wrapped.sendall(greeting)
        if not wrapped.recv(100):
            raise ConnectionError("closed without an answer")
        found = wrapped.session
        with contextlib.suppress(OSError):
            while port == "http" and wrapped.recv(1000):
                pass
            wrapped.unwrap()
    return found


def keep_open(router: Any, certs: Path) -> http.client.HTTPSConnection:
    context = client_tls(certs).context()
    context.check_hostname = False
    host, port = router.address
    return http.client.HTTPSConnection(host, port, timeout=20, context=context)


def ask(connection: http.client.HTTPSConnection) -> http.client.HTTPResponse:
    connection.request("GET", "/health")
    answer = connection.getresponse()
    assert answer.status == 200 and answer.read()
    return answer


@pytest.mark.parametrize(
    "version", [pytest.param(ssl.TLSVersion.TLSv1_2, marks=pytest.mark.long), ssl.TLSVersion.TLSv1_3]
)
@pytest.mark.parametrize("port", ["http", pytest.param("grpc", marks=pytest.mark.long)])
def test_a_session_of_a_removed_authority_opens_nothing(
    port: str, version: ssl.TLSVersion, asking: Any, certs: Path
) -> None:
    router, live = asking
    ours, theirs = client_tls(live).context(), client_tls(certs / "theirs").context()
    theirs.load_verify_locations(live / "ca.pem")
    ours.set_alpn_protocols(["h2" if port == "grpc" else "http/1.1"])
    theirs.set_alpn_protocols(["h2" if port == "grpc" else "http/1.1"])
    ours.minimum_version = ours.maximum_version = version
    sessions: list[ssl.SSLSession | None] = [None]
    try:
        sessions.append(open_one(router, port, ours))
    except OSError:
        assert (port, version) == ("http", ssl.TLSVersion.TLSv1_2), (
            "1.2 could resume sessions at the HTTP port"
        )
        return
    kept = keep_open(router, live)
    assert not ask(kept).will_close
    shutil.copy(certs / "theirs" / "client-ca.pem", live / "client-ca.pem")

    def enters() -> bool:
        with contextlib.suppress(OSError):
            open_one(router, port, theirs)
            return True
        return False

    def refused(session: ssl.SSLSession | None, port: str = port, context: ssl.SSLContext = ours) -> bool:
        try:
            open_one(router, port, context, session)
        except OSError:
            return True
        return False

    wait_for(enters, 30, "the new authority is taken over")
    for session in sessions:
        wait_for(partial(refused, session), 1.5, "the removed one is refused")
    # Each port reads the authority for itself; the connection that was kept is one of HTTP.
    wait_for(partial(refused, None, "http", client_tls(live).context()), 1.5, "the HTTP port refuses it")
    assert ask(kept).will_close, "a connection of before has one more answer"
    with pytest.raises(OSError):
        ask(kept)
