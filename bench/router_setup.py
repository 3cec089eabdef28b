"""A router in front of stub workers, with a Redis of its own: real processes all."""

from __future__ import annotations

import contextlib
import json
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

START_SECONDS = 60.0
STOP_SECONDS = 20.0
NAMESPACE = "bench"


@dataclass(frozen=True)
class RouterBench:
    """Addresses of the doors, of the stub workers behind them, and who to ask for processor time."""

    http: str
    grpc: str
    pid: int
    workers: str
    redis_url: str


@contextlib.contextmanager
def run(
    out: Path, model: Path, workers: Sequence[str] = ("bench.stubs",), **settings: Any
) -> Iterator[RouterBench]:
    """`workers`: the module that serves them, and its flags; `settings`: the router's, besides those it needs."""
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        redis = EmbeddedRedis.start(out.absolute() / "redis")
        stack.callback(redis.stop)
        command = ["-m", *workers, "--redis-url", redis.url, "--namespace", NAMESPACE]
        stubs = stack.enter_context(_process(*command))
        assert stubs.stdout is not None
        address = stubs.stdout.readline().strip()
        ready = out / "router.ready"
        ready.unlink(missing_ok=True)
        config = _router_config(out, model, redis.url, settings)
        router = stack.enter_context(
            _process("-m", "baton", "router", "--config", str(config), "--ready-file", str(ready))
        )
        addresses = _wait_for(ready, router)
        yield RouterBench(addresses["http"], addresses["grpc"], router.pid, address, redis.url)


def _router_config(out: Path, model: Path, redis_url: str, settings: Mapping[str, Any]) -> Path:
    config: dict[str, Any] = {
        "redis_url": redis_url,
        "namespace": NAMESPACE,
        "model": str(model),
        "served_model_name": "bench",
        "http_port": 0,
        "grpc_port": 0,
        "local_prefill": "fallback",
        **settings,
    }
    file = out / "router.json"
    file.write_text(json.dumps(config))
    return file


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, *arguments], stdin=pipe, stdout=pipe, text=True)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)
        assert process.stdout is not None
        process.stdout.close()


def _wait_for(ready: Path, router: subprocess.Popen[str]) -> dict[str, str]:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and router.poll() is None:
        if ready.exists():
            addresses: dict[str, str] = json.loads(ready.read_text())
            if _answers(f"{addresses['http']}/ready"):
                return addresses
        time.sleep(0.05)
    raise RuntimeError(f"the router did not get ready (exit code {router.poll()})")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
