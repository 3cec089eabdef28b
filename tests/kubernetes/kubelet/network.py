"""Pods' network: a bridge on this machine, and for every pod a network namespace with one address on it.

Needs root. Nothing leaves the machine: the bridge's network is one of those reserved for benchmarks (RFC 2544),
and packets are not forwarded to anywhere else.
"""

from __future__ import annotations

import random
import secrets
import threading
from types import TracebackType
from typing import Self

from tests.kubernetes.kubelet.iproute import find_ip, run

ATTEMPTS = 20


class Network:
    """A /24 of its own."""

    def __init__(self) -> None:
        self.bridge = f"bt{secrets.token_hex(4)}"
        self._ip = find_ip()
        self._prefix = ""
        self._lock = threading.Lock()
        self._last = 1

    @property
    def gateway(self) -> str:
        """This machine, as pods see it."""
        return f"{self._prefix}.1"

    def __enter__(self) -> Self:
        taken = self._ip.run("-4", "-o", "addr")
        for _ in range(ATTEMPTS):
            self._prefix = f"198.{random.randint(18, 19)}.{random.randint(0, 255)}"
            if f" {self._prefix}." not in taken:
                break
        self._ip.run("link", "add", self.bridge, "type", "bridge")
        self._ip.run("addr", "add", f"{self.gateway}/24", "dev", self.bridge)
        self._ip.run("link", "set", self.bridge, "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ip.run("link", "del", self.bridge)

    def next_address(self) -> str:
        with self._lock:
            if self._last == 254:
                raise RuntimeError(f"{self._prefix}.0/24 has no addresses left")
            self._last += 1
            return f"{self._prefix}.{self._last}"

    def add_address(self, address: str) -> None:
        """An address of a Service: it ends at this machine."""
        self._ip.run("addr", "add", f"{address}/32", "dev", self.bridge)

    def drop_address(self, address: str) -> None:
        self._ip.run("addr", "del", f"{address}/32", "dev", self.bridge)

    def connect(self, pid: int, address: str, hostname: str) -> None:
        """Gives the namespaces of a process its address and name. The link goes with the namespace."""
        link = f"v{secrets.token_hex(5)}"
        self._ip.run("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._ip.run("link", "set", link, "master", self.bridge, "up")
        inside = f"""
            set -e
            echo {hostname} > /proc/sys/kernel/hostname
            "$0" link set lo up
            "$0" addr add {address}/24 dev eth0
            "$0" link set eth0 up
            "$0" route add default via {self.gateway}
        """
        enter = ["nsenter", "-t", str(pid), "-n", "-u", "sh", "-c", inside, self._ip.path]
        run(enter, self._ip.environment)
