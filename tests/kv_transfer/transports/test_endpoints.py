"""A rank's NIXL endpoint listens only on the interface of its worker and the ports that a firewall knows, and does
without TCP where RDMA is required, or where unauthenticated transfers were not asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from cluster.addresses import interface_of, is_loopback
from cluster.config.worker import TransferConfig
from cluster.errors import ConfigError
from kv_transfer.transports import ucx
from kv_transfer.transports.ucx import RDMA_TLS, _ucx_settings, open_nixl
from tests.harness.own_address import address_beside_loopback

LISTENS = """
import json, os, sys, psutil
from cluster.config.worker import TransferConfig
from kv_transfer.transports.ucx import open_nixl

settings = json.loads(sys.argv[1])
endpoint = open_nixl(TransferConfig(**settings["transfer"]), "worker", 1, 0, **settings["reach"])
connections = psutil.Process().net_connections("inet")
listens = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN or c.type == 2]
print(json.dumps([endpoint is not None, listens]), flush=True)
os._exit(0)
"""


def listens(transfer: dict[str, Any], environment: dict[str, str] | None = None, **reach: Any) -> Any:
    """Whether there is an agent, and its listening sockets. In a process of its own: UCX's threads outlive an agent."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", LISTENS, json.dumps({"transfer": transfer, "reach": reach})],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**clean, **(environment or {})},
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_nixl_keeps_to_the_port_range() -> None:
    there, sockets = listens({"port_range": "41000-41999"})
    assert there and sockets and all(41000 <= port <= 41999 for _, port in sockets)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.3", "::1", "localhost"])
def test_a_worker_on_loopback_opens_no_port_elsewhere(host: str) -> None:
    there, sockets = listens({}, host=host)
    assert there and sockets and all(is_loopback(address) for address, _ in sockets)


def test_a_worker_opens_ports_on_its_own_interface_only() -> None:
    own = address_beside_loopback()
    there, sockets = listens({}, host=own)
    assert there and own in {address for address, _ in sockets}
    interface = interface_of(own)
    allowed = {one.address.partition("%")[0] for one in psutil.net_if_addrs()[interface]}
    assert {address for address, _ in sockets} <= allowed


def test_a_further_address_of_an_interface_has_its_name_without_the_label(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linux lists `ip addr add … label eth0:1` under the label, which UCX, gloo and NCCL do not find."""
    address = SimpleNamespace(address="10.9.9.9")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [], "eth0:1": [address]})
    assert interface_of("10.9.9.9") == "eth0"


def test_the_operators_ucx_settings_are_kept() -> None:
    _, sockets = listens({}, {"UCX_NET_DEVICES": "lo"}, host=address_beside_loopback())
    assert sockets and all(is_loopback(address) for address, _ in sockets)


def test_the_address_of_no_interface_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert "UCX_NET_DEVICES" not in _ucx_settings(TransferConfig(), "192.0.2.77", False)
    assert "192.0.2.77" in caplog.text and "UCX_NET_DEVICES" in caplog.text


def test_where_no_interface_has_the_advertised_address_nixl_listens_on_that_of_the_worker(
    caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    """Without an interface UCX would listen on every one, also where the worker listens on one only."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    settings = _ucx_settings(TransferConfig(), "192.0.2.77", False, "127.0.0.1")
    assert settings["UCX_NET_DEVICES"] == interface_of("127.0.0.1")
    assert "192.0.2.77" in caplog.text and "127.0.0.1" in caplog.text
    assert "UCX_NET_DEVICES" not in _ucx_settings(TransferConfig(), "192.0.2.77", False, "0.0.0.0")


@pytest.mark.long
def test_with_tls_nothing_listens_for_nixl_unless_it_is_named(tmp_path: Path) -> None:
    assert listens({"transport": "auto"}, tls=True) == [False, []]
    there, sockets = listens({"transport": "nixl"}, tls=True)
    assert there and sockets


def test_with_tls_a_pair_that_requires_nixl_names_the_setting(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(ucx, "RDMA_DEVICES", tmp_path)
    with pytest.raises(ConfigError, match="transport: nixl"):
        open_nixl(TransferConfig(require_transport="nixl"), "worker", 1, 0, tls=True)


@pytest.fixture
def rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has two RDMA ports in /sys."""
    for port in ("mlx5_0/ports/1", "mlx5_1/ports/2"):
        (tmp_path / port).mkdir(parents=True)
    monkeypatch.setattr(ucx, "RDMA_DEVICES", tmp_path)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.delenv("UCX_TLS", raising=False)


@pytest.mark.usefixtures("rdma")
def test_with_rdma_tls_and_auto_leave_ucx_no_tcp() -> None:
    own = address_beside_loopback()
    settings = _ucx_settings(TransferConfig(), own, True)
    assert settings == {
        "UCX_TLS": RDMA_TLS,
        "UCX_NET_DEVICES": f"{interface_of(own)},mlx5_0:1,mlx5_1:2",
    }
    assert _ucx_settings(TransferConfig(), "127.0.0.1", False) == {"UCX_NET_DEVICES": "lo"}


@pytest.mark.usefixtures("rdma")
def test_with_tls_and_auto_the_operator_may_not_allow_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "rc,tcp")
    with pytest.raises(ConfigError, match="allows tcp, transport: auto with TLS does not") as refused:
        open_nixl(TransferConfig(), "worker", 1, 0, tls=True)
    assert refused.value.field == "transfer.transport"


def test_other_processes_do_not_inherit_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with ucx._environment({"UCX_TLS": "sm", "UCX_NET_DEVICES": "lo"}):
        assert (os.environ["UCX_TLS"], os.environ["UCX_NET_DEVICES"]) == ("sm", "lo")
    assert os.environ["UCX_TLS"] == "tcp,self" and "UCX_NET_DEVICES" not in os.environ


REQUIRES = """
import os
from cluster.config.worker import TransferConfig
from cluster.errors import TransportError
from kv_transfer.transports.ucx import open_nixl

try:
    print(open_nixl(TransferConfig(require_transport="rdma"), "worker", 1, 0), flush=True)
except TransportError as error:
    print("refused:", error, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="there is RDMA here")
def test_a_worker_without_rdma_does_not_start_where_it_is_required() -> None:
    """Over TCP it would, and only a slow hand-off would show it."""
    clean = {name: value for name, value in os.environ.items() if name != "UCX_TLS"}
    done = subprocess.run(
        [sys.executable, "-c", REQUIRES], capture_output=True, text=True, timeout=120, check=True, env=clean
    )
    assert done.stdout.splitlines()[-1].startswith("refused: NIXL does not start")


@pytest.mark.parametrize("given", ["tcp", "rc,cuda_copy,cuda_ipc,sm,self,tcp", "all", "^rc"])
def test_ucx_may_not_be_set_to_use_more(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", given)
    with pytest.raises(ConfigError, match="UCX_TLS"):
        open_nixl(TransferConfig(require_transport="rdma"), "worker", 1, 0)


def test_a_transport_that_does_not_exist_is_refused_at_start() -> None:
    with pytest.raises(ValidationError, match="require_transport"):
        TransferConfig(require_transport="RDMA")  # type: ignore[arg-type]
    assert RDMA_TLS.count("tcp") == 0
