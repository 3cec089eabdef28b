"""Redis over TLS, with certificates on both sides and a password, all configured by the URL."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path

import httpx
import pytest
import redis

from baton.client import Client
from baton.local.certs import make_certs
from baton.processes.ports import free_ports
from cluster.redis.connect import connect
from router.placement.script_call import ScriptCall
from tests.harness.redis_servers import Server, run_server
from tests.harness.router import run_router, stub_workers
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.system
PASSWORD = f"pass-{secrets.token_hex(8)}"
OF_SENTINEL = f"pass-{secrets.token_hex(8)}"


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """The URL of a server that takes TLS only, and asks for a certificate and the password."""
    directory = tmp_path_factory.mktemp("redis")
    make_certs(directory, [], 2)
    (port,) = free_ports(1)
    options = ["--tls-port", str(port), "--requirepass", PASSWORD, "--bind", "127.0.0.1"]
    options += [
        "--tls-cert-file",
        str(directory / "router.pem"),
        "--tls-key-file",
        str(directory / "router.key"),
    ]
    options += ["--tls-ca-cert-file", str(directory / "ca.pem"), "--tls-auth-clients", "yes"]
    with run_server(directory, *options):
        files = f"ssl_certfile={directory}/worker.pem&ssl_keyfile={directory}/worker.key"
        yield f"rediss://:{PASSWORD}@127.0.0.1:{port}/0?ssl_ca_certs={directory}/ca.pem&{files}"


def test_only_tls_with_certificate_and_password_gets_in(secured):
    with connect(secured) as client:
        assert client.ping()
    plain = secured.replace("rediss", "redis").partition("?")[0]
    wrong = {
        "plain text": plain,
        "no authority": secured.partition("?")[0],
        "no certificate": secured.partition("&")[0],
        "no password": secured.replace(f":{PASSWORD}@", ""),
    }
    for url in wrong.values():
        with connect(url) as client, pytest.raises(redis.RedisError):
            client.ping()


def test_a_sentinel_over_tls_with_a_password_of_its_own(secured, tmp_path):
    master = port_of(secured)
    folder, (port,) = Path(secured.partition("ssl_ca_certs=")[2].partition("/ca.pem")[0]), free_ports(1)
    lines = [
        *("port 0", f"tls-port {port}", "tls-replication yes", "tls-auth-clients yes", "bind 127.0.0.1"),
        *(f"tls-cert-file {folder}/router.pem", f"tls-key-file {folder}/router.key"),
        *(f"tls-ca-cert-file {folder}/ca.pem", f"requirepass {OF_SENTINEL}"),
        *(f"sentinel monitor baton 127.0.0.1 {master} 1", f"sentinel auth-pass baton {PASSWORD}"),
    ]
    (tmp_path / "sentinel.conf").write_text("\n".join(lines) + "\n")
    server = Server(tmp_path, ["sentinel.conf", "--sentinel"], ready="Sentinel ID is")
    server.start()
    try:
        url = secured.replace("rediss", "rediss+sentinel").replace(f":{master}/0", f":{port}/baton")
        with connect(url) as client, pytest.raises(redis.RedisError, match=r"(?i)authenticat") as caught:
            client.ping()
        assert PASSWORD not in str(caught.value)
        with connect(f"{url}&sentinel_password={OF_SENTINEL}") as client:
            wait_for(client.ping, 20, "the Sentinel names the master")
            assert client.info("replication")["role"] == "master"
        plain = f"{url.partition('?')[0]}?sentinel_password={OF_SENTINEL}"
        with connect(plain) as client, pytest.raises(redis.RedisError):
            client.ping()  # without the authority
        assert asyncio.run(answers(f"{url}&sentinel_password={OF_SENTINEL}"))
    finally:
        server.stop()


def port_of(url: str) -> int:
    return int(url.rpartition("@")[2].partition("/")[0].rpartition(":")[2])


async def answers(url: str) -> bool:
    """Whether the pipelined connection of placements works too."""
    script = ScriptCall(url, "return 1")
    try:
        return bool(await script([], [], 20.0) == 1)
    finally:
        await script.close()


def test_a_router_and_workers_over_it(secured, checkpoint, tmp_path):
    namespace = f"test-{secrets.token_hex(4)}"
    config = {"model": str(checkpoint("llama")), "redis_url": secured, "namespace": namespace}
    with stub_workers(secured, namespace), run_router(tmp_path, config) as router:
        wait_for(lambda: httpx.get(f"{router.http}/ready").status_code == 200, 60, "ready")
        with Client(router.grpc) as client:

            def placed_by_redis() -> bool:
                """Not the first request, if its router has found Redis too slow when it started."""
                said = client.generate("abc", max_tokens=3, explain=True)
                return bool(json.loads(said.explanation)[0]["from_redis"])

            wait_for(placed_by_redis, 10, "a request is placed by the script in Redis")
        assert PASSWORD not in router.log.read_text()
