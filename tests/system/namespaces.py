"""Hosts of their own on one machine: network namespaces on a bridge, and packets between two of them that get lost.

A blackhole route at the sender loses what it sends to one address, one way, also on connections that are open; the
receiver learns nothing of it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUBNET = "10.213.77"


# The kernel deletes a namespace and its links some time after `ip netns del` has returned, so that a second network
# of the same process cannot have the names of the first.
_numbers = itertools.count()


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True, timeout=60)
    if check and done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done


def may_make_namespaces() -> bool:
    """As root, with the tools, in a kernel and a container that let us."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"bt{os.getpid()}"
    try:
        _ip("netns", "add", name)
        made = _ip("-n", name, "link", "add", "bt0", "type", "bridge", check=False).returncode == 0
        made = made and _ip("-n", name, "link", "add", "bt1", "type", "veth", check=False).returncode == 0
        _ip("netns", "del", name)
    except (subprocess.SubprocessError, OSError):
        return False
    return made


@dataclass
class Network:
    """`HUB` is the machine itself; every other host has a namespace."""

    hosts: Sequence[str]
    name: str = field(default_factory=lambda: f"bt{os.getpid()}n{next(_numbers)}")
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    cuts: list[tuple[str, str]] = field(default_factory=list)

    def address(self, host: str) -> str:
        return f"{SUBNET}.{1 if host == 'hub' else 2 + self.hosts.index(host)}"

    def namespace(self, host: str) -> str:
        return f"{self.name}{host}"

    def start(
        self, host: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        inside = [] if host == "hub" else ["ip", "netns", "exec", self.namespace(host)]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*inside, *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )
        self.processes.append(process)
        return process

    def baton(
        self, host: str, role: str, config: Path, log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "baton", role, "--config", str(config)]
        return self.start(
            host, [*command, "--ready-file", str(config.with_suffix(".ready"))], log, environment
        )

    def lose(self, sender: str, receiver: str) -> None:
        """From now on nothing that `sender` sends to `receiver` arrives."""
        self.cuts.append((sender, receiver))
        _ip(*self._in(sender), "route", "add", "blackhole", f"{self.address(receiver)}/32")

    def heal(self) -> None:
        for sender, receiver in self.cuts:
            _ip(*self._in(sender), "route", "del", "blackhole", f"{self.address(receiver)}/32")
        self.cuts.clear()

    def _in(self, host: str) -> list[str]:
        return [] if host == "hub" else ["-n", self.namespace(host)]


@contextlib.contextmanager
def make_network(*hosts: str) -> Iterator[Network]:
    network = Network(hosts)
    bridge = network.name  # of a link's name the kernel takes 15 bytes
    _ip("link", "add", bridge, "type", "bridge")
    try:
        _ip("addr", "add", f"{network.address('hub')}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for index, host in enumerate(hosts):
            space, outer = network.namespace(host), f"{network.name}v{index}"
            _ip("netns", "add", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", outer, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{network.address(host)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
        yield network
    finally:
        network.heal()
        for process in reversed(network.processes):
            process.terminate()
        for process in network.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        for index, host in enumerate(hosts):
            _ip("link", "del", f"{network.name}v{index}", check=False)
            _ip("netns", "del", network.namespace(host), check=False)
        _ip("link", "del", bridge, check=False)
