"""Routers as real processes in front of stub workers: what is tested here is what they let in."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.auth.keys import new_key
from tests.end_to_end.conftest import wait_for

START_SECONDS = 60.0


@dataclass(frozen=True)
class Router:
    http: str
    grpc: str
    pid: int
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.http.partition("//")[2].rsplit(":", 1)
        return host, int(port)


class KeyFile:
    """A keys file that a test writes again and again."""

    def __init__(self, path: Path):
        self.path = path
        self.entries: list[dict[str, Any]] = []
        self.write()

    def add(self, tenant: str, **fields: Any) -> str:
        key, entry = new_key(tenant, **fields)
        self.entries.append(entry.model_dump(mode="json", exclude_defaults=True))
        self.write()
        return key

    def write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(yaml.safe_dump(self.entries))
        part.replace(self.path)


@contextlib.contextmanager
def stub_workers(redis_url: str, namespace: str, *module: str) -> Iterator[str]:
    """Both roles, answering at once with made-up tokens; or another module's, with its flags."""
    served = module or ("bench.stubs",)
    command = [sys.executable, "-m", *served, "--redis-url", redis_url, "--namespace", namespace]
    with _process([*command, "--pairs", "1"], None) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


@contextlib.contextmanager
def run_router(directory: Path, config: dict[str, Any]) -> Iterator[Router]:
    """`baton router` with this configuration; stopped at the end, and it must not have logged an exception."""
    directory.mkdir(parents=True, exist_ok=True)
    file, ready, log = directory / "router.json", directory / "router.ready", directory / "router.log"
    ready.unlink(missing_ok=True)
    file.write_text(json.dumps({"http_port": 0, "grpc_port": 0, "local_prefill": "fallback", **config}))
    command = [sys.executable, "-m", "baton", "router", "--config", str(file), "--ready-file", str(ready)]
    with _process(command, log) as process:
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        facts = json.loads(ready.read_text())
        yield Router(facts["http"], facts["grpc"], process.pid, log)
    said = log.read_text(errors="replace")
    assert '"exception"' not in said and "Traceback" not in said, said


def wait_ready(http: str, **client: Any) -> None:
    import httpx

    def ready() -> bool:
        return bool(httpx.get(f"{http}/ready", **client).status_code == 200)

    wait_for(ready, START_SECONDS, "the router is ready")


@contextlib.contextmanager
def _process(command: list[str], log: Path | None) -> Iterator[subprocess.Popen[str]]:
    with contextlib.ExitStack() as stack:
        output: Any = stack.enter_context(log.open("w")) if log is not None else subprocess.PIPE
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT if log is not None else None,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
        )
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)
            if process.stdout is not None:
                process.stdout.close()
