"""The garbage collector is off during imports only."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from baton.processes.without_gc import without_gc
from baton.workers import start_worker
from cluster.config.worker import EngineConfig, WorkerConfig


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


def test_the_collector_is_off_inside_and_on_again_after() -> None:
    with without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_again_after_an_import_that_failed() -> None:
    with pytest.raises(ImportError), without_gc():
        raise ImportError
    assert gc.isenabled()


def test_where_it_was_off_it_stays_off() -> None:
    gc.disable()
    with without_gc():
        pass
    assert not gc.isenabled()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_a_worker_has_loaded_is_never_collected(role, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen once it serves, in every way to start one: a full collection would stop all threads for 0.1 s."""
    worker, frozen = object(), list[object]()

    async def start(config: WorkerConfig) -> object:
        assert not frozen
        return worker

    module = ModuleType(f"{role}_worker.worker")
    module.start = start  # type: ignore[attr-defined]
    package = ModuleType(f"{role}_worker")
    package.worker = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"{role}_worker", package)
    monkeypatch.setitem(sys.modules, f"{role}_worker.worker", module)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    config = WorkerConfig(role=role, engine=EngineConfig(model=Path("m")))
    assert await start_worker(config) is worker
    assert frozen == [1]
