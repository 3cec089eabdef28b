"""A rank's NIXL endpoint listens only on the ports that a firewall knows, and does without TCP where RDMA is required."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from cluster.config import TransferConfig
from cluster.errors import ConfigError
from worker.endpoints import RDMA_TLS, open_endpoint

LISTENS = """
import json, os, psutil
from cluster.config import TransferConfig
from worker.endpoints import open_endpoint

endpoint = open_endpoint(TransferConfig(port_range="41000-41999"), "worker", 1, 0)
assert endpoint is not None
connections = psutil.Process().net_connections("tcp")
print(json.dumps([c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN]), flush=True)
os._exit(0)
"""


def test_nixl_keeps_to_the_port_range() -> None:
    # In a process of its own: UCX reads its environment once.
    done = subprocess.run(
        [sys.executable, "-c", LISTENS], capture_output=True, text=True, timeout=120, check=True
    )
    ports = json.loads(done.stdout.splitlines()[-1])
    assert ports and all(41000 <= port <= 41999 for port in ports)


REQUIRES = """
import os
from cluster.config import TransferConfig
from cluster.errors import TransportError
from worker.endpoints import open_endpoint

try:
    print(open_endpoint(TransferConfig(require_transport="rdma"), "worker", 1, 0), flush=True)
except TransportError as error:
    print("refused:", error, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="there is RDMA here")
def test_a_worker_without_rdma_does_not_start_where_it_is_required() -> None:
    """Over TCP it would: nothing but a slow hand-off would tell."""
    clean = {name: value for name, value in os.environ.items() if name != "UCX_TLS"}
    done = subprocess.run(
        [sys.executable, "-c", REQUIRES], capture_output=True, text=True, timeout=120, check=True, env=clean
    )
    assert done.stdout.splitlines()[-1].startswith("refused: NIXL does not start")


@pytest.mark.parametrize("given", ["tcp", "rc,cuda_copy,cuda_ipc,sm,self,tcp", "all", "^rc"])
def test_ucx_may_not_be_told_to_use_more(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", given)
    with pytest.raises(ConfigError, match="UCX_TLS"):
        open_endpoint(TransferConfig(require_transport="rdma"), "worker", 1, 0)


def test_a_transport_that_does_not_exist_is_refused_at_start() -> None:
    with pytest.raises(ValidationError, match="require_transport"):
        TransferConfig(require_transport="RDMA")  # type: ignore[arg-type]
    assert RDMA_TLS.count("tcp") == 0
