"""Resources shared by a pod's containers: an address, a host name, and the names of Services."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from tests.kubernetes.kubelet.network import Network

START_SECONDS = 10.0
LOCAL = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n"


class Sandbox:
    """Network, IPC and host name namespaces, held by a process that sleeps."""

    def __init__(self, network: Network, hostname: str, folder: Path):
        self.address = network.next_address()
        self.hostname = hostname
        self.hosts = folder / "hosts"
        self.resolver = folder / "resolv.conf"
        self.hosts.write_text(LOCAL)
        # Names that are not in `hosts` cannot be resolved: no name server listens.
        self.resolver.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        self._pause = subprocess.Popen(
            ["unshare", "-n", "-i", "-u", "sleep", "infinity"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._wait()
            network.connect(self.pid, self.address, hostname)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._pause.pid

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        mine = os.readlink("/proc/self/ns/uts")
        while os.readlink(f"/proc/{self.pid}/ns/uts") == mine:
            if time.monotonic() > deadline or self._pause.poll() is not None:
                raise RuntimeError("no namespaces for a pod: this needs root")
            time.sleep(0.005)

    def set_names(self, lines: str) -> None:
        """Rewrites the file in place: containers have it mounted."""
        text = f"{LOCAL}{self.address} {self.hostname}\n{lines}".encode()
        with self.hosts.open("r+b") as file:
            if file.read() != text:
                file.seek(0)
                # First what is new, then the cut: a reader never finds an empty file.
                file.write(text)
                file.truncate()

    def close(self) -> None:
        self._pause.kill()
        self._pause.wait(START_SECONDS)
