"""Addresses of routers that are wrong, or of the other port: one sentence that says what to do."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress

import grpc
import pytest

from baton.local.certs import make_certs
from loadgen.reach import NotGrpc, why_not_grpc, why_not_http, why_unreachable

SETTINGS_FRAME = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def test_commands_without_a_cluster_name_the_way_to_one(said):
    for command in (
        ("chat", "--target"),
        ("generate", "hello", "--target"),
        ("status", "--url"),
        ("top", "--once", "--url"),
    ):
        found = said(*command, "127.0.0.1:1")
        assert "no router answers at" in found and "`baton up` starts a cluster on this machine" in found
    found = said("load", "--target", "127.0.0.1:1", code=2)
    assert "--target 127.0.0.1:1: nothing answers there (Connection refused)" in found


@contextmanager
def answering(reply: bytes, context: ssl.SSLContext | None = None) -> Iterator[str]:
    """The address of a server that answers every connection's first bytes so, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with suppress(OSError), connection, ExitStack() as stack:
                    if context is not None:
                        connection = stack.enter_context(context.wrap_socket(connection, server_side=True))
                    connection.recv(1000)
                    connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_the_other_port_of_a_router_is_named_as_such(said):
    with answering(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n") as http:
        for command in (("chat",), ("generate", "hello")):
            assert "this port serves HTTP: name a router's gRPC port" in said(*command, "--target", http)
        assert "--protocol http loads an HTTP port" in said("load", "--target", http, code=2)
        plain = NotGrpc("this port does not use TLS: leave --tls-ca out")
        assert why_not_grpc(http, tls=ssl.create_default_context()) == plain
        found = why_not_grpc(http, tls=None)
        assert found is not None and found.is_http
        assert not why_not_http(http)
    with answering(SETTINGS_FRAME) as grpc:
        assert "does not serve HTTP" in said("status", "--url", grpc)
        found = said("load", "--protocol", "http", "--target", grpc, code=2)
        assert "this port serves gRPC: name a router's HTTP port" in found
        assert not why_not_grpc(grpc, tls=None)
        assert why_not_grpc(grpc, tls=ssl.create_default_context()) == plain
    assert "addresses are written host:port" in said("generate", "hi", "--target", "http://127.0.0.1:1")
    assert not why_not_grpc("unix:/run/router", tls=None) and not why_not_grpc("dns:///h:5", tls=None)


def test_a_port_of_a_worker_is_no_router(said):
    """Of gRPC it has other services, and at its port of metrics no view of the cluster."""
    pool = futures.ThreadPoolExecutor(1)
    worker = grpc.server(pool)
    address = f"127.0.0.1:{worker.add_insecure_port('127.0.0.1:0')}"
    worker.start()
    for command in (("chat",), ("generate", "hello")):
        found = said(*command, "--target", address)
        assert f"no router answers at {address} (Method not found!): name a router's gRPC port" in found
    worker.stop(None).wait(5)
    pool.shutdown()
    for body in (b"baton_worker_up 1", b"[]", b"{}"):
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        with answering(head + body) as metrics:
            found = said("top", "--once", "--url", metrics)
            assert f"http://{metrics} is no router of a Baton cluster: name a router's HTTP port" in found


def test_a_port_that_closes_connections_is_no_router(said):
    with answering(b"") as other:
        found = said("generate", "hello", "--target", other)
    assert f"no router answers at {other} (" in found and "name a router's gRPC port" in found


def test_a_port_with_tls_is_named_as_such(said, tmp_path):
    make_certs(tmp_path, [], 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "router.pem", tmp_path / "router.key")
    with answering(b"", context) as router:
        assert "this port requires TLS: give its authority" in said("generate", "hi", "--target", router)
        assert "this port requires TLS: write https://" in why_not_http(router)
        found = said("status", "--url", f"https://{router}")
        assert "its certificate is not signed by a trusted authority" in found
        own, other = tmp_path / "ca.pem", tmp_path / "other" / "ca.pem"
        make_certs(other.parent, [], 1)
        assert not why_not_grpc(router, tls=ssl.create_default_context(cafile=own))
        assert not why_not_http(f"https://{router}", tls=ssl.create_default_context(cafile=own))
        for command in (("chat",), ("generate", "hi")):
            found = said(*command, "--target", router, "--tls-ca", str(other))
            assert f"--target {router}: its certificate is not signed by a trusted authority" in found
            assert "give the authority by --tls-ca" in found and "OPENSSL" not in found.upper()
        for target in ((router,), (f"https://{router}", "--protocol", "http")):
            found = said("load", "--target", *target, "--tls-ca", str(other), code=2)
            assert "its certificate is not signed by a trusted authority" in found
    no_certificate = tmp_path / "keys.yaml"
    no_certificate.write_text("- id: 1")
    for file, reason in ((tmp_path / "none.pem", "No such file"), (no_certificate, "NO_CERTIFICATE")):
        for command in (("generate", "hi"), ("status",)):
            assert f"TLS files {file}: " in (text := said(*command, "--tls-ca", str(file))) and reason in text
        text = said("load", "--target", "127.0.0.1:1", "--tls-ca", str(file), code=2)
        assert f"--tls-ca {file} cannot be read: " in text and reason in text


def test_a_load_without_tls_reads_no_certificates(said, monkeypatch):
    def refuse(**_: object) -> None:
        raise AssertionError("certificates were read")

    monkeypatch.setattr(ssl, "create_default_context", refuse)
    for target in (("127.0.0.1:1",), ("127.0.0.1:1", "--protocol", "http")):
        assert "nothing answers there" in said("load", "--target", *target, code=2)
    with pytest.raises(AssertionError, match="certificates were read"):
        said("load", "--protocol", "http", "--target", "https://127.0.0.1:1", code=2)


def test_a_port_that_is_none(said):
    """The C library takes the number's last 16 bits, and reports what listens there."""
    for command, flag, address in (
        ("generate hi", "--target", "127.0.0.1:99999"),
        ("top --once", "--url", "http://127.0.0.1:99999"),
    ):
        found = said(*command.split(), flag, address)
        assert "ports end at 65535" in found


def test_a_host_that_is_no_name(said):
    assert "no router answers at a..b:5" in said("generate", "hello", "--target", "a..b:5")


def test_addresses_that_are_not_written_as_host_and_port(said):
    assert "--target : an address is written host:port" in said("generate", "hello", "--target", "")
    assert "in brackets, before its port: [::1]:50051" in said("generate", "hello", "--target", "::1")


def test_a_proxy_that_grpc_takes_is_not_gone_round(monkeypatch):
    for name in ("grpc_proxy", "http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    assert why_unreachable("router.invalid:50051") == ""
    assert why_unreachable("127.0.0.1:1") and why_unreachable("http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "router.invalid")
    assert why_unreachable("router.invalid:50051")
