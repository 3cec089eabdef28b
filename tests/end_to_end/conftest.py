"""Whole clusters of real processes, started as a user would start them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

START_SECONDS = 150.0
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Cluster:
    process: subprocess.Popen[str]
    state: dict[str, Any]

    @property
    def http(self) -> str:
        return str(self.state["http"])

    @property
    def grpc(self) -> str:
        return str(self.state["grpc"])

    @property
    def routers(self) -> list[str]:
        return [router["grpc"] for router in self.state["router"]]

    def workers(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.http}/v1/cluster", timeout=10) as answer:
            workers: list[dict[str, Any]] = json.load(answer)["workers"]
        return workers

    def status(self, role: str) -> dict[str, Any]:
        """The status of the only worker of a role."""
        (worker,) = [w for w in self.workers() if w["role"] == role and w["lease"] == "live"]
        status: dict[str, Any] = worker["status"]
        return status


Start = Callable[..., Cluster]


def wait_for(check: Callable[[], Any], seconds: float, what: str) -> Any:
    """Polls until `check` is truthy; the last exception, if any, explains the failure."""
    deadline = time.monotonic() + seconds
    problem: BaseException | None = None
    while time.monotonic() < deadline:
        try:
            if result := check():
                return result
        except Exception as error:
            problem = error
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}") from problem


@contextlib.contextmanager
def run_cluster(directory: Path, model: Path, *flags: str) -> Iterator[Cluster]:
    """`baton up` with its own ports and Redis; stopped with SIGTERM, and it must stop cleanly."""
    directory.mkdir(parents=True, exist_ok=True)
    state_file = directory / "state.json"
    command = [sys.executable, "-m", "baton", "up", "--model", str(model), "--state-file", str(state_file)]
    command += ["--http-port", "0", "--grpc-port", "0", *flags]
    log = directory / "up.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "200"}
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not state_file.exists():
            assert process.poll() is None, f"baton up exited with {process.returncode}:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"baton up is not ready:\n{log.read_text()}"
            time.sleep(0.05)
        yield Cluster(process, json.loads(state_file.read_text()))
    finally:
        stopped_by_us = process.poll() is None
        if stopped_by_us:
            process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert stopped_by_us, f"baton up ended by itself with {code}:\n{log.read_text()}"
    assert code == 0, log.read_text()
    assert not state_file.exists()


@pytest.fixture
def start_cluster(tmp_path: Path) -> Iterator[Start]:
    """Starts clusters that end with the test."""
    with contextlib.ExitStack() as stack:
        count = 0

        def start(model: Path, *flags: str) -> Cluster:
            nonlocal count
            count += 1
            return stack.enter_context(run_cluster(tmp_path / f"cluster-{count}", model, *flags))

        yield start
