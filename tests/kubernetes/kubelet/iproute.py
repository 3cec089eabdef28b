"""The `ip` command: the machine's own, or Debian's package unpacked beside us, never installed."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness import debian_packages

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "out" / "tools" / "iproute"
# The command, and the libraries it needs that a small image may lack.
PACKAGES = ("iproute2", "libbpf1", "libelf1", "libmnl0", "libxtables12", "libtirpc3", "libtirpc-common")
COMMAND_SECONDS = 20


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
    root = debian_packages.unpacked(folder, *PACKAGES)
    libraries = {str(file.parent) for file in root.rglob("*.so*")}
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(sorted(libraries))}
    return IpCommand(str(root / "bin/ip"), environment)
