"""A router in front of stub workers, with a Redis of its own, all as real processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.redis.embedded import EmbeddedRedis
from tests.harness.preloaded import ForkedProcess, preloaded

START_SECONDS = 60.0
STOP_SECONDS = 20.0
NAMESPACE = "bench"


@dataclass(frozen=True)
class RunningRouter:
    """Addresses of its ports, and its pid, for processor time."""

    http: str
    grpc: str
    pid: int
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        """Of the HTTP endpoint."""
        host, port = self.http.partition("//")[2].rsplit(":", 1)
        return host, int(port)


@dataclass(frozen=True)
class RouterBench:
    """A router, the stub workers behind it, and their Redis."""

    http: str
    grpc: str
    pid: int
    workers: str
    redis_url: str


@contextlib.contextmanager
def run(
    out: Path, model: Path, workers: Sequence[str] = ("tests.harness.stub_workers",), **settings: Any
) -> Iterator[RouterBench]:
    """`workers`: the module that serves them, and its flags; `settings`: the router's, besides those it needs."""
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        redis = EmbeddedRedis.start(out.absolute() / "redis")
        stack.callback(redis.stop)
        address = stack.enter_context(stub_workers(redis.url, NAMESPACE, *workers))
        config = {
            "redis_url": redis.url,
            "namespace": NAMESPACE,
            "model": str(model),
            "served_model_name": "bench",
            **settings,
        }
        router = stack.enter_context(run_router(out, config))
        _wait_until_ready(router)
        yield RouterBench(router.http, router.grpc, router.pid, address, redis.url)


@contextlib.contextmanager
def stub_workers(redis_url: str, namespace: str, *module: str) -> Iterator[str]:
    """The address of workers of both roles that a module, with its flags, serves until its stdin ends."""
    command = ["-m", *module, "--redis-url", redis_url, "--namespace", namespace]
    with python(*command) as workers:
        assert workers.stdout is not None, "nothing is logged: it is a pipe"
        yield workers.stdout.readline().strip()


@contextlib.contextmanager
def run_router(out: Path, settings: Mapping[str, Any]) -> Iterator[RunningRouter]:
    """`baton router` on ports of its own. Raises RuntimeError, with its last words, if it does not start."""
    out.mkdir(parents=True, exist_ok=True)
    file, ready, log = out / "router.json", out / "router.ready", out / "router.log"
    ready.unlink(missing_ok=True)
    standard = {"http_port": 0, "grpc_port": 0, "local_prefill": "fallback", "secret": "of this bench"}
    file.write_text(json.dumps({**standard, **settings}))
    command = ["-m", "baton", "router", "--config", str(file), "--ready-file", str(ready)]
    with python(*command, log=log) as process:
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the router did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.02)
        facts = json.loads(ready.read_text())
        yield RunningRouter(facts["http"], facts["grpc"], process.pid, log)


@contextlib.contextmanager
def python(*arguments: str, log: Path | None = None) -> Iterator[subprocess.Popen[str] | ForkedProcess]:
    """A Python process whose output goes to `log` or a pipe. After the block its stdin is closed and it is terminated."""
    environment = {**os.environ, "COLUMNS": "200"}
    with contextlib.ExitStack() as stack:
        output: Any = None if log is None else stack.enter_context(log.open("w"))
        process: subprocess.Popen[str] | ForkedProcess
        if (forks := preloaded()) is not None and arguments[0] == "-m":
            fds = (None, 2) if output is None else (output.fileno(), output.fileno())
            process = forks.fork(arguments[1:], environment, *fds)
        else:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if output is None else output,
                stderr=None if output is None else subprocess.STDOUT,
                text=True,
                env=environment,
            )
        try:
            yield process
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[str] | ForkedProcess) -> None:
    assert process.stdin is not None, "it is a pipe"
    process.stdin.close()
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)
    if process.stdout is not None:
        process.stdout.close()


def _wait_until_ready(router: RunningRouter) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _answers(f"{router.http}/ready"):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the router did not get ready:\n{router.log.read_text()[-2000:]}")
        time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
