"""Workers, and endpoints that ask for one, refuse clients without the right certificate; new ones need no restart."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cryptography import x509
from prometheus_client.parser import text_string_to_metric_families

from baton.client import AsyncClient, Client, ClientTls
from baton.local.certs import make_certs
from cluster.errors import UnavailableError
from cluster.security.identity import Identity, make_identity
from cluster.security.tls import ClientTls as Files
from cluster.security.tls import ListenerContext, Peers, router_channel_async
from loadgen.config import LoadConfig
from loadgen.grpc_target import _channel as load_channel
from tests.harness.router import run_router, stub_workers
from tests.harness.waiting import until, wait_for
from tests.security.conftest import NAME
from tests.security.identities import client_tls, identity
from tests.security.tls_worker import Worker, calls

BODY = {"model": NAME, "prompt": "abc", "max_tokens": 3}


async def test_a_worker_answers_routers_and_workers_each_their_own(certs):
    ours = certs / "ours"
    async with Worker(Peers(identity(ours, "worker"))) as worker:
        as_router = await calls(Peers(identity(ours, "router")).channel(worker.address))
        assert as_router == {"Run": b"token", "Cancel": b"cancelled", "Handoff": "PERMISSION_DENIED"}
        as_worker = await calls(Peers(identity(ours, "worker")).channel(worker.address))
        assert as_worker == {
            "Run": "PERMISSION_DENIED",
            "Cancel": "PERMISSION_DENIED",
            "Handoff": b"welcome",
        }


async def test_no_proxy_of_the_environment_comes_between_processes(monkeypatch):
    """Companies set one for the whole machine; it reaches no worker, and no router on this machine."""
    for name in ("https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("grpc_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with Worker(Peers()) as worker:
        address = worker.address
        config = LoadConfig(requests=1)
        for channel in (
            Peers().channel(address),
            router_channel_async(address, None, ()),
            router_channel_async(f"dns:///{address}", None, ()),
            load_channel(config, address),
        ):
            assert (await calls(channel))["Run"] == b"token"
        for elsewhere in (router_channel_async, lambda host, *_: load_channel(config, host)):
            assert (await calls(elsewhere("router.invalid:1", None, ())))["Run"] == "UNAVAILABLE"


async def test_grpc_proxy_is_for_processes_and_not_for_clients_on_loopback(monkeypatch):
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with Worker(Peers()) as worker:
        for channel in (
            router_channel_async(worker.address, None, ()),
            load_channel(LoadConfig(requests=1), worker.address),
        ):
            assert (await calls(channel))["Run"] == b"token"
        assert (await calls(Peers().channel(worker.address)))["Run"] == "UNAVAILABLE"


async def test_a_worker_refuses_any_other_certificate(certs):
    ours, theirs = certs / "ours", certs / "theirs"
    shut = {"Run": "UNAVAILABLE", "Cancel": "UNAVAILABLE", "Handoff": "UNAVAILABLE"}
    name = [("grpc.ssl_target_name_override", "worker.baton.internal")]
    async with Worker(Peers(identity(ours, "worker"))) as worker:

        def channel(ca: Path, key: Path | None, cert: Path | None) -> grpc.aio.Channel:
            return grpc.aio.secure_channel(worker.address, Files(ca, cert, key).credentials(), options=name)

        refused = {
            "plain text": grpc.aio.insecure_channel(worker.address),
            "no certificate": channel(ours / "ca.pem", None, None),
            "another authority's": channel(ours / "ca.pem", theirs / "router.key", theirs / "router.pem"),
            "a client's": channel(ours / "ca.pem", ours / "client.key", ours / "client.pem"),
            "does not trust us": Peers(identity(theirs, "router")).channel(worker.address),
        }
        for what, one in refused.items():
            assert await calls(one) == shut, what
    # A server that is not a worker is not spoken to, even with a certificate of the right authority.
    async with Worker(Peers(identity(ours, "router"))) as impostor:
        assert await calls(Peers(identity(ours, "router")).channel(impostor.address)) == shut


async def test_a_stream_ends_with_the_certificate_of_its_caller(certs, monkeypatch):
    """A hand-off stream lasts as long as its pair has hand-offs: without end."""
    ours, now = certs / "ours", time.time
    peers = Peers(identity(ours, "worker"))
    async with Worker(peers) as worker, peers.channel(worker.address) as channel:
        method: Any = channel.stream_stream("/t.T/Handoff", None, None)
        call = method(timeout=60)
        for _ in range(2):
            await call.write(b"")
            assert await call.read() == b"welcome"
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now() + 31 * 86_400)
            await call.write(b"")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_whole_new_authority_is_taken_up_while_serving(certs, tmp_path):
    live = tmp_path / "live"
    shutil.copytree(certs / "ours", live)
    serving, asking = Peers(identity(live, "worker")), Peers(identity(live, "router"))
    async with Worker(serving) as worker:
        assert (await calls(asking.channel(worker.address)))["Run"] == b"token"
        before = asking.version
        shutil.rmtree(live)
        shutil.copytree(certs / "theirs", live)
        async with asyncio.timeout(60):
            await until(lambda: asking.version != before, "the new files are read")
            while (await calls(asking.channel(worker.address)))["Run"] != b"token":
                await asyncio.sleep(0.05)
        assert (await calls(Peers(identity(certs / "ours", "router")).channel(worker.address)))[
            "Run"
        ] == "UNAVAILABLE"


@pytest.fixture(scope="module")
def tls_router(certs, checkpoint, redis_server, tmp_path_factory):
    """A router that asks clients for certificates, before plain stub workers; its files may change."""
    live = tmp_path_factory.mktemp("router") / "live"
    shutil.copytree(certs / "ours", live)
    namespace = f"test-{secrets.token_hex(4)}"
    config = {
        "model": str(checkpoint("llama")),
        "served_model_name": NAME,
        "redis_url": redis_server.url,
        "namespace": namespace,
        "tls_cert": str(live / "router.pem"),
        "tls_key": str(live / "router.key"),
        "tls_client_ca": str(live / "client-ca.pem"),
    }
    directory = tmp_path_factory.mktemp("router")
    with stub_workers(redis_server.url, namespace), run_router(directory, config) as running:
        tls = client_tls(live)
        wait_for(
            lambda: httpx.get(f"{running.http}/ready", verify=tls.context()).status_code == 200, 30, "ready"
        )
        yield running, live


def test_the_endpoints_accept_tls_clients_with_a_certificate(tls_router, certs):
    router, live = tls_router
    assert router.http.startswith("https://")
    answer = httpx.post(f"{router.http}/v1/completions", json=BODY, verify=client_tls(live).context())
    assert answer.json()["usage"]["completion_tokens"] == 3
    with Client(router.grpc, tls=client_tls(live)) as client:
        assert len(client.generate("abc", max_tokens=3).choices[0].token_ids) == 3

    async def asynchronous() -> int:
        async with AsyncClient(router.grpc, tls=client_tls(live)) as client:
            return len((await client.generate("abc", max_tokens=3)).choices[0].token_ids)

    assert asyncio.run(asynchronous()) == 3


@pytest.mark.parametrize("client", ["no certificate", "their client", "our router"])
def test_the_endpoints_refuse_the_wrong_certificate(client, tls_router, certs):
    router, live = tls_router
    own = {
        "no certificate": (None, None),
        "their client": (certs / "theirs" / "client.pem", certs / "theirs" / "client.key"),
        "our router": (live / "router.pem", live / "router.key"),
    }[client]
    tls = ClientTls(live / "ca.pem", *own)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{router.http}/health", verify=tls.context())
    with Client(router.grpc, tls=tls) as client, pytest.raises(UnavailableError):
        client.models(timeout_seconds=5)


def test_plain_text_gets_nowhere(tls_router):
    router, _ = tls_router
    with Client(router.grpc) as client, pytest.raises(UnavailableError):
        client.models(timeout_seconds=5)
    with socket.create_connection(router.address, timeout=60) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" not in sock.recv(100)


def test_the_endpoints_use_a_new_certificate_without_a_restart(tls_router):
    router, live = tls_router
    context = client_tls(live).context()

    def shown(port: int) -> int:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as sock,
            context.wrap_socket(sock, server_hostname="localhost") as wrapped,
        ):
            der = wrapped.getpeercert(binary_form=True)
        assert der is not None
        return x509.load_der_x509_certificate(der).serial_number

    ports = [router.address[1], int(router.grpc.rsplit(":", 1)[1])]
    context.set_alpn_protocols(["h2"])
    before = [shown(port) for port in ports]
    assert before[0] == before[1]
    make_certs(live, [], 30)
    new = x509.load_pem_x509_certificate((live / "router.pem").read_bytes()).serial_number
    assert new != before[0]
    wait_for(
        lambda: [shown(port) for port in ports] == [new, new], 60, "both endpoints show the new certificate"
    )
    metrics = httpx.get(f"{router.http}/metrics", verify=client_tls(live).context()).text
    expires = {
        sample.labels["certificate"]: sample.value / 86400
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "baton_certificate_expires_seconds"
    }
    assert set(expires) == {"tls_cert", "tls_ca", "tls_client_ca"}
    assert 29 < expires["tls_cert"] <= 30 and min(expires.values()) == expires["tls_cert"]


def handshake_accepted(listener: ListenerContext, directory: Path, version: ssl.TLSVersion, session=None):
    """(Whether the client of this directory was accepted, the connection), in memory."""
    asking = client_tls(directory).context()
    asking.minimum_version = asking.maximum_version = version
    asking.load_verify_locations(directory.parent / "ours" / "ca.pem")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asking.wrap_bio(down, up, server_hostname="localhost", session=None)
    server = listener.context.wrap_bio(up, down, server_side=True)
    if session is not None:
        client = session.context.wrap_bio(down, up, server_hostname="localhost", session=session.session)

    def both(step) -> bool:
        for _ in range(6):
            for end in (client, server):
                try:
                    step(end)
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLError:
                    return False
        return True

    if not both(lambda end: end.do_handshake()):
        return False, client
    both(lambda end: end.unwrap())  # OpenSSL forgets the session of a connection that does not end cleanly
    return True, client


def test_the_http_endpoint_drops_an_authority_that_was_removed(certs, tmp_path):
    live = tmp_path / "live"
    shutil.copytree(certs / "ours", live)
    now = 0.0
    own = Identity(live / "router.pem", live / "router.key", live / "client-ca.pem", clock=lambda: now)
    listener = ListenerContext(own, ask_clients=True)
    version = ssl.TLSVersion.TLSv1_3
    assert not handshake_accepted(listener, certs / "ours", ssl.TLSVersion.TLSv1_2)[0], (
        "it could resume sessions"
    )
    accepted, before = handshake_accepted(listener, certs / "ours", version)
    assert accepted and not handshake_accepted(listener, certs / "theirs", version)[0]
    shutil.copy(certs / "theirs" / "client-ca.pem", live / "client-ca.pem")
    now += 10
    listener.refresh()
    assert handshake_accepted(listener, certs / "theirs", version)[0]
    assert not handshake_accepted(listener, certs / "ours", version)[0]
    assert not handshake_accepted(listener, certs / "ours", version, before)[0], (
        "a session of before opens nothing"
    )


def test_without_client_certificates_the_http_endpoint_takes_tls_1_2(certs):
    own = make_identity(certs / "ours" / "router.pem", certs / "ours" / "router.key", None)
    assert own is not None
    listener = ListenerContext(own, ask_clients=False)
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        assert handshake_accepted(listener, certs / "ours", version)[0]
