"""A whole cluster of real processes, started as a user would start it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 240.0
STOP_SECONDS = 90.0


@dataclass(frozen=True)
class Cluster:
    pid: int
    state: dict[str, Any]

    @property
    def http(self) -> str:
        return str(self.state["http"])

    @property
    def grpc(self) -> str:
        return str(self.state["grpc"])

    @property
    def router_pids(self) -> list[int]:
        return [router["pid"] for router in self.state["router"]]

    @property
    def worker_pids(self) -> list[int]:
        return [worker["pid"] for role in ("prefill", "decode") for worker in self.state[role]]

    @property
    def own_pids(self) -> list[int]:
        """Baton's own processes: Ray's are not among them, Redis is."""
        redis = self.state["redis"]["pid"]
        own = [self.pid, *self.router_pids, *self.worker_pids]
        return [*own, redis] if redis else own

    def view(self) -> dict[str, Any]:
        """What /v1/cluster says now."""
        with urllib.request.urlopen(f"{self.http}/v1/cluster", timeout=10) as answer:
            said: dict[str, Any] = json.load(answer)
        return said


@contextlib.contextmanager
def run(out: Path, model: Path, *flags: str) -> Iterator[Cluster]:
    """`baton up` with ports of its own. Raises RuntimeError with its last words if it does not get ready."""
    out.mkdir(parents=True, exist_ok=True)
    state_file, log = out / "state.json", out / "up.log"
    state_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "baton", "up", "--model", str(model), "--state-file", str(state_file)]
    command += ["--http-port", "0", "--grpc-port", "0", *flags]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=_environment())
    try:
        _wait_for(state_file, process, log)
        yield Cluster(process.pid, json.loads(state_file.read_text()))
    finally:
        _stop(process)


def _environment() -> dict[str, str]:
    # The bench's own thread settings are not the cluster's.
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def _wait_for(state_file: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not state_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"baton up did not get ready:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)
