"""A rank's NIXL endpoint listens only on the ports that a firewall knows."""

from __future__ import annotations

import json
import subprocess
import sys

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
