"""A light Ray head: a child of `baton up`, addressed by its port, never discovered.

Every port is assigned, because 10001 and 52365 are fixed otherwise and two clusters on a machine would clash.
Ray listens on all addresses in any case, so a token, new for every cluster, protects it.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from baton.local import children
from baton.processes.ports import free_ports
from cluster.errors import SetupError

START_SECONDS = 120.0
STOP_SECONDS = 30.0
_PORT_FLAGS = (
    "--port",
    "--node-manager-port",
    "--object-manager-port",
    "--ray-client-server-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
)
OBJECT_STORE_BYTES = 80_000_000  # Ray carries no tokens and no KV: the smallest store it accepts


@dataclass(frozen=True)
class RayHead:
    child: children.Child
    address: str
    env: dict[str, str]

    def stop(self) -> None:
        self.child.stop(STOP_SECONDS)


def start(
    num_cpus: int,
    logs: Path,
    temp_dir: Path,
    resources: Mapping[str, float] = MappingProxyType({}),
    push_seconds: float = 0.0,
) -> RayHead:
    """Like `launch`, but returns once Ray accepts connections. Raises SetupError."""
    head = launch(num_cpus, logs, temp_dir, resources, push_seconds)
    wait_until_started(head)
    return head


def launch(
    num_cpus: int,
    logs: Path,
    temp_dir: Path,
    resources: Mapping[str, float] = MappingProxyType({}),
    push_seconds: float = 0.0,
) -> RayHead:
    """Starts a head with `num_cpus` logical CPUs, and further resources by their names. Serve's replicas send their
    numbers every `push_seconds` (0: Serve's own 10 s). It ends as a whole when one of Ray's processes dies."""
    ports = free_ports(len(_PORT_FLAGS))
    env = {
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }
    if push_seconds > 0:
        env["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = str(push_seconds)
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"]
    command += [f"{flag}={port}" for flag, port in zip(_PORT_FLAGS, ports, strict=True)]
    command += [
        "--node-ip-address=127.0.0.1",
        f"--num-cpus={num_cpus}",
        f"--resources={json.dumps(dict(resources))}",
        "--include-dashboard=False",
        "--include-log-monitor=False",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--disable-usage-stats",
        f"--temp-dir={temp_dir}",
    ]
    return RayHead(children.start("ray", command, logs, env), f"127.0.0.1:{ports[0]}", env)


def wait_until_started(head: RayHead) -> None:
    """Raises SetupError."""
    deadline = time.monotonic() + START_SECONDS
    while "Ray runtime started" not in head.child.tail(200):
        children.check_alive([head.child])
        if time.monotonic() > deadline:
            head.stop()
            raise SetupError(f"Ray did not start within {START_SECONDS:.0f} s:\n{head.child.tail()}")
        time.sleep(0.1)
