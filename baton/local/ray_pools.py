"""Ray's head and the process that deploys the pools; both restart when any of Ray's own processes dies, or the head hangs.

ray exits ──► its pools process is ended ──► ray, pools again ──► new replicas take over the workers, which keep serving
"""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from baton.local import children
from baton.local.children import Child
from baton.local.supervisor import Supervisor
from baton.processes.ports import free_ports
from baton.ray_pools.supervision import worker_sockets
from cluster.errors import SetupError
from cluster.ray_head import RayHeadWatch, probe

log = logging.getLogger(__name__)

KILL_SECONDS = 0.1
HANG_SECONDS = 30.0  # silence after which Ray is killed
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
RAY = Path(sys.executable).parent / "ray"  # its command, in the environment of this process
OBJECT_STORE_BYTES = 80_000_000  # Ray carries no tokens and no KV: the smallest store it accepts


@dataclass(frozen=True)
class RayHead:
    child: Child
    address: str
    env: dict[str, str]

    def stop(self) -> None:
        self.child.stop(STOP_SECONDS)


class RayPools:
    """`described`: the file that `baton pools` reads. `launch` starts a head; its log belongs to the caller."""

    def __init__(self, described: Path, logs: Path, workers: Path, launch: Callable[[], RayHead]):
        self._described = described
        self._logs = logs
        self._workers = workers
        self._launch = launch
        self._deployed = described.with_suffix(".ready")
        self._head: RayHead | None = None
        self._watch: RayHeadWatch | None = None
        self._ray = Supervisor()
        self._pools = Supervisor()
        worker_sockets.write_owner(workers)

    def start(self) -> None:
        """Return when Ray accepts connections; workers start later. Raises SetupError."""
        try:
            head = self._start_head()
        except SetupError as error:
            # Ray limits its start to 30 s, which a busy machine may exceed, rarely twice.
            log.warning("Ray did not start, trying once more: %s", error)
            head = self._start_head()
        self._ray.add(head.child, self._start_again, on_exit=self._ray_exited)
        self._deploy(head)

    def _start_head(self) -> RayHead:
        head = self._head = self._launch()
        try:
            wait_until_started(head)
        except SetupError:
            head.stop()
            raise
        return head

    def check(self) -> list[str]:
        """Restart processes that have died (see Supervisor), and Ray if its head hangs."""
        return [*self._kill_hanging(), *self._ray.check(), *self._pools.check()]

    def _kill_hanging(self) -> list[str]:
        """Workers go on meanwhile, as when one of Ray's processes dies."""
        head, watch = self._head, self._watch
        if head is None:
            return []
        if watch is None or watch.address != head.address:
            self._watch_head(head)
            return []
        # One that has not responded yet is starting.
        if (
            not watch.has_responded
            or watch.silent_seconds < HANG_SECONDS
            or head.child.exit_code() is not None
        ):
            return []
        head.child.stop(KILL_SECONDS)
        self._unwatch()
        return [f"{watch.why_silent}: Ray is killed, and started again"]

    def _watch_head(self, head: RayHead) -> None:
        self._unwatch()
        self._watch = RayHeadWatch(
            head.address,
            means="workers go on; Ray is started again if this lasts",
            probe=partial(probe, token=head.env.get("RAY_AUTH_TOKEN", "")),
        )

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None

    @property
    def children(self) -> list[Child]:
        return [*self._ray.children, *self._pools.children]

    def stop(self, seconds: float) -> None:
        ray_lives = all(child.exit_code() is None for child in self._ray.children)
        if self._watch is not None and self._watch.why_silent:
            ray_lives = False  # it would not end them
        self._unwatch()
        # Stopping it ends Serve, its replicas and their workers; without Ray it would wait for ever.
        children.stop_all(self._pools.children, seconds if ray_lives else KILL_SECONDS)
        if self._head is not None:
            self._head.stop()
        worker_sockets.end_all(self._workers, seconds)

    def _ray_exited(self, child: Child) -> None:
        """Called after Ray's exit, perhaps only when the next Ray already runs, which then owns the pools."""
        if self._head is not None and self._head.child is child:
            self._end_pools()

    def _end_pools(self) -> None:
        for one in self._pools.children:
            one.stop(KILL_SECONDS)
        self._pools = Supervisor()

    def _start_again(self) -> Child:
        """Restart without waiting for Ray, because the caller also watches routers; `baton pools` waits."""
        self._end_pools()
        self._head = self._launch()
        self._deploy(self._head)
        return self._head.child

    def _deploy(self, head: RayHead) -> None:
        self._deployed.unlink(missing_ok=True)
        start = partial(self._start_pools, head)
        self._pools.add(start(), start)

    def _start_pools(self, head: RayHead) -> Child:
        command = children.baton_command("pools", "--config", str(self._described), "--address", head.address)
        command += ["--ready-file", str(self._deployed)]
        if self._deployed.exists():  # only this process died; deploying again would replace every worker
            command.append("--deployed")
        return children.start("pools", command, self._logs, head.env)


def launch(
    num_cpus: int,
    logs: Path,
    temp_dir: Path,
    resources: Mapping[str, float] = MappingProxyType({}),
    push_seconds: float = 0.0,
) -> RayHead:
    """Start a head with `num_cpus` logical CPUs, and further resources by their names. Serve's replicas send their
    numbers every `push_seconds` (0: Serve's own 10 s). It ends as a whole when one of Ray's processes dies."""
    ports = free_ports(len(_PORT_FLAGS))
    env = {
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        # No other node joins. Else `ray start` replaces 127.0.0.1 by the machine's address, and Ray listens everywhere.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    if push_seconds > 0:
        env["RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = str(push_seconds)
    command = [str(RAY), "start", "--head", "--block"]
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
