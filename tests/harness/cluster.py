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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.preloaded import ForkedProcess, Preloaded

START_SECONDS = 240.0
STOP_SECONDS = 90.0


@dataclass(frozen=True)
class Cluster:
    process: subprocess.Popen[str] | ForkedProcess
    state: dict[str, Any]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def http(self) -> str:
        return str(self.state["http"])

    @property
    def grpc(self) -> str:
        return str(self.state["grpc"])

    @property
    def routers(self) -> list[str]:
        """gRPC addresses."""
        return [router["grpc"] for router in self.state["router"]]

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
        """The document of /v1/cluster."""
        with urllib.request.urlopen(f"{self.http}/v1/cluster", timeout=10) as answer:
            said: dict[str, Any] = json.load(answer)
        return said

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.view()["workers"]
        return workers

    def status(self, role: str) -> dict[str, Any]:
        """The status of the only worker of a role."""
        (worker,) = [w for w in self.workers() if w["role"] == role and w["lease"] == "live"]
        status: dict[str, Any] = worker["status"]
        return status


@contextlib.contextmanager
def run(
    out: Path,
    model: Path,
    *flags: str,
    tree: Path | None = None,
    environment: Mapping[str, str] | None = None,
    start_seconds: float = START_SECONDS,
    stop_seconds: float = STOP_SECONDS,
    forks: Preloaded | None = None,
) -> Iterator[Cluster]:
    """`baton up` with ports of its own; `tree`: of another checkout; `forks`: of this process.
    Raises RuntimeError with its last words if it does not get ready, or had to be killed."""
    out.mkdir(parents=True, exist_ok=True)
    state_file, log = (out / "state.json").absolute(), out / "up.log"
    state_file.unlink(missing_ok=True)
    arguments = ["up", "--model", str(model), "--state-file", str(state_file)]
    arguments += ["--http-port", "0", "--grpc-port", "0", *flags]
    variables = dict(_environment(tree) if environment is None else environment)
    process: subprocess.Popen[str] | ForkedProcess
    with log.open("w") as output:
        if forks is not None:
            fds = output.fileno(), output.fileno()
            process = forks.fork(["tests.harness.forked_up", *arguments], variables, *fds)
            process.stdin.close()
        else:
            process = subprocess.Popen(
                [sys.executable, "-m", "baton", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tree,
                env=variables,
            )
    try:
        _wait_for(state_file, process, log, start_seconds)
        yield Cluster(process, json.loads(state_file.read_text()))
    finally:
        _stop(process, stop_seconds)


def _environment(tree: Path | None) -> dict[str, str]:
    # The bench's own thread settings are not the cluster's.
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return kept if tree is None else {**kept, "PYTHONPATH": str(tree)}


def _wait_for(
    state_file: Path, process: subprocess.Popen[str] | ForkedProcess, log: Path, seconds: float
) -> None:
    deadline = time.monotonic() + seconds
    while not state_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"baton up did not get ready:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[str] | ForkedProcess, seconds: float) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(seconds)
        raise RuntimeError(f"baton up did not stop within {seconds:.0f} s") from None
