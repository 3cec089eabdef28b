"""Every listening socket of every process of a cluster is one that docs/security.md ("Ports") declares, and each is on
loopback if the cluster is."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import psutil
import pytest

from baton.client import Client
from cluster.addresses import is_loopback
from tests.end_to_end.conftest import run_cluster
from tests.end_to_end.handover import PROCESS
from tests.harness.cluster import Cluster
from tests.security.identities import client_tls

SERVE_CALL = "/ray.serve.ASGIService/HandleRequest"
NIXL, STORE, GLOO, LINK = "NIXL", "the ranks' store", "gloo", "links"


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Addresses and ports, TCP and UDP. Several sockets of a router share its gRPC port."""
    return {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or connection.type.name == "SOCK_DGRAM"
    }


def declared(
    cluster: Cluster, process: psutil.Process, unnamed: dict[str, list[str]]
) -> tuple[set[int], list[str]]:
    """Of one process: the ports that the state file names, and what else listens on a port of the system's choice."""
    for role in ("router", "prefill", "decode"):
        for one in cluster.state[role]:
            if one["pid"] == process.pid:
                urls = [one.get(name) for name in ("http", "grpc", "address", "metrics")]
                named = {
                    int(port)
                    for url in urls
                    if url and (port := urlsplit(f"//{url.rpartition('/')[2]}").port)
                }
                return named, unnamed.get(role, [])
    if "spawn_main" in " ".join(process.cmdline()):
        return set(), unnamed["rank"]
    return set(), []


def assert_declared(cluster: Cluster, unnamed: dict[str, list[str]]) -> None:
    parent = psutil.Process(cluster.process.pid)
    seen = 0
    for process in (parent, *parent.children(recursive=True)):
        found = listening(process)
        named, others = declared(cluster, process, unnamed)
        name = " ".join(process.cmdline()[:5])
        assert all(is_loopback(address) for address, _ in found), (name, found)
        assert {port for _, port in found} >= named, (name, found, named)
        assert len(found) == len(named) + len(others), (name, found, named, others)
        seen += len(found)
    assert seen >= 6


@pytest.mark.long
def test_a_cluster_on_loopback_listens_nowhere_else(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    flags = [*PROCESS, "--prefill-tp", "2"]
    with run_cluster(tmp_path / "cluster", checkpoint("llama"), *flags, forked=False) as cluster:
        with Client(cluster.grpc) as client:
            client.generate("a baton is handed over", max_tokens=4, temperature=0)
        unnamed = {"prefill": [NIXL, STORE, GLOO, LINK], "rank": [NIXL, GLOO], "decode": [NIXL, LINK]}
        assert_declared(cluster, unnamed)


@pytest.mark.long
def test_a_cluster_on_ray_listens_on_loopback_but_for_ports_that_rays_token_guards(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """All of Ray's ports were on every interface. One of each of Serve's replicas still is, because Serve names it so:
    what comes there is unpickled, from holders of the token."""
    flags = ["--pool", "ray", *PROCESS[2:]]
    with run_cluster(tmp_path / "cluster", checkpoint("llama"), *flags, forked=False) as cluster:
        with Client(cluster.grpc) as client:
            client.generate("a baton is handed over", max_tokens=4, temperature=0)
        parent = psutil.Process(cluster.process.pid)
        workers = [psutil.Process(worker["status"]["pid"]) for worker in cluster.workers()]
        of_ray, open_ports = 0, []
        for process in (parent, *parent.children(recursive=True), *workers):
            with contextlib.suppress(psutil.NoSuchProcess):
                found, name = listening(process), " ".join(process.cmdline()[:5])
                elsewhere = [one for one in found if not is_loopback(one[0])]
                assert len(elsewhere) <= name.startswith("ray::ServeReplica"), (name, found)
                open_ports += [port for _, port in elsewhere]
                of_ray += len(found) if "ray" in name else 0
        assert of_ray >= 4 and len(open_ports) <= 2
        for port in open_ports:
            with (
                grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
                pytest.raises(grpc.RpcError) as refused,
            ):
                channel.unary_unary(SERVE_CALL, None, None)(b"", timeout=10)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.long
def test_with_tls_no_port_takes_kv_from_an_unauthenticated_peer(
    checkpoint: Callable[[str], Path], certs: Any, tmp_path: Path
) -> None:
    """`transport: auto`, the default: UCX authenticates no peer, so KV goes through gRPC's mutual TLS."""
    live = tmp_path / "live"
    shutil.copytree(certs / "ours", live)
    flags = ["--certs", str(live), *PROCESS]
    with run_cluster(tmp_path / "cluster", checkpoint("llama"), *flags, forked=False) as cluster:
        with Client(cluster.grpc, tls=client_tls(live)) as client:
            answer = client.generate("a baton is handed over", max_tokens=4, temperature=0)
        assert answer.timings is not None and answer.timings.transport == "grpc"
        assert_declared(cluster, {"prefill": [LINK], "decode": [LINK]})
