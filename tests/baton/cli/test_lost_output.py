"""Processes that serve go on, drain and stop when nothing takes their output: a full disk, a pipe without a reader."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from baton.cli import output, serve

ENDINGS = (signal.SIGINT, signal.SIGTERM)
LOST = ["full disk", "no reader"]


@contextlib.contextmanager
def lost(kind: str) -> Iterator[None]:
    """Within the test's call: between a fixture and the call pytest sets `sys.stdout`."""
    if kind == "full disk":
        writes = os.open("/dev/full", os.O_WRONLY)
    else:
        reads, writes = os.pipe()
        os.close(reads)
    before = sys.stdout
    with os.fdopen(writes, "w") as file:
        sys.stdout = file
        try:
            yield
        finally:
            sys.stdout = before
            output.console.quiet = False  # rich silences a console whose reader has left
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, writes)
            os.close(devnull)


@pytest.fixture(autouse=True)
def kept_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ENDINGS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Worker(SimpleNamespace):
    worker_id, address, metrics_address = "w", "127.0.0.1:1", "127.0.0.1:2"
    drained = False

    async def wait_failed(self) -> None:
        await asyncio.Event().wait()

    async def wait_drain_wanted(self) -> None:
        pass

    async def stop(self) -> None:
        self.drained = True


def serve_worker(monkeypatch: pytest.MonkeyPatch, ready_file: Path | None) -> Worker:
    worker = Worker()

    async def started(_: object) -> Worker:
        return worker

    monkeypatch.setattr("baton.workers.start_worker", started)
    monkeypatch.setattr("cluster.telemetry.logs.configure", lambda name: None)
    config: Any = SimpleNamespace(worker_id="w", role="decode")
    try:
        asyncio.run(serve._serve_worker(config, ready_file))
    except OSError:
        assert ready_file is not None, "only a ready file ends it"
    return worker


@pytest.mark.parametrize("kind", LOST)
def test_a_worker_serves_and_drains(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with lost(kind):
        assert serve_worker(monkeypatch, None).drained


def test_a_worker_whose_ready_file_has_no_room_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serve_worker(monkeypatch, tmp_path / "missing" / "ready").drained


@pytest.mark.parametrize("kind", LOST)
def test_a_router_serves_and_drains(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with lost(kind):
        assert serve_router(monkeypatch, None).closed


def test_a_router_whose_ready_file_has_no_room_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serve_router(monkeypatch, tmp_path / "missing" / "ready").closed


class Router:
    http_url, grpc_address = "http://127.0.0.1:1", "127.0.0.1:2"
    made: ClassVar[list[Router]] = []

    def __init__(self, config: object) -> None:
        self.closed = False
        self.made.append(self)

    async def start(self) -> None:
        signal.raise_signal(signal.SIGTERM)  # which comes in the middle of the start

    async def close(self) -> None:
        self.closed = True


def serve_router(monkeypatch: pytest.MonkeyPatch, ready_file: Path | None) -> Router:
    monkeypatch.setattr("router.server.Router", Router)
    monkeypatch.setattr("cluster.telemetry.logs.configure", lambda name: None)
    config: Any = SimpleNamespace(router_id="r")
    try:
        asyncio.run(serve._run_router(config, ready_file))
    except OSError:
        assert ready_file is not None, "only a ready file ends it"
    return Router.made.pop()
