"""The `ip` command: the machine's own, or Debian's package unpacked beside us, never installed."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "out" / "tools" / "iproute"
# The command, and the libraries it needs that a small image may lack.
PACKAGES = ("iproute2", "libbpf1", "libelf1", "libmnl0", "libxtables12", "libtirpc3", "libtirpc-common")
DOWNLOAD_SECONDS, COMMAND_SECONDS = 300, 20


@dataclass(frozen=True)
class IpCommand:
    path: str
    environment: Mapping[str, str]

    def run(self, *arguments: str) -> str:
        """Raises RuntimeError with its output."""
        return run([self.path, *arguments], self.environment)


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_SECONDS, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@functools.cache
def find_ip() -> IpCommand:
    if installed := shutil.which("ip"):
        return IpCommand(installed, dict(os.environ))
    return unpacked()


def unpacked(folder: Path = TOOLS) -> IpCommand:
    root = folder / "root"
    if not (root / "bin/ip").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["apt-get", "download", "-qq", *PACKAGES], cwd=folder, check=True, timeout=DOWNLOAD_SECONDS
        )
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(root)], check=True, timeout=60)
    libraries = {str(file.parent) for file in root.rglob("*.so*")}
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(sorted(libraries))}
    return IpCommand(str(root / "bin/ip"), environment)
