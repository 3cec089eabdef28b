"""The engine's thread of a loaded model, on a card that is not the node's first one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.config.worker import EngineConfig, WorkerConfig
from engine.runner import ModelRunner
from tests.engine.fake_model import FakeRunner
from worker import loaded_engine
from worker.health import Phase


@pytest.mark.parametrize(("device", "selected"), [("cuda:1", [torch.device("cuda:1")]), ("cpu", [])])
def test_a_runner_selects_its_card(device, selected, monkeypatch):
    calls: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    runner = ModelRunner.__new__(ModelRunner)
    runner.device = torch.device(device)
    runner.use_thread()
    assert calls == selected


async def test_the_engine_s_thread_selects_it(monkeypatch):
    """The model is loaded on another thread, whose current card is no other thread's."""
    threads: list[str] = []
    runner: Any = FakeRunner(8)
    runner.use_thread = lambda: threads.append(threading.current_thread().name)
    watch = SimpleNamespace(
        healthy=lambda: True, kill_silent=lambda seconds: None, run=lambda *_: asyncio.sleep(0)
    )
    ranks = SimpleNamespace(
        draft=None,
        runner=runner,
        watch=watch,
        warm_up=lambda tell: tell("warm"),
        close=lambda between_steps: None,
    )
    monkeypatch.setattr(loaded_engine, "open_ranks", lambda *_: ranks)
    config = WorkerConfig(
        role="decode", engine=EngineConfig(model=Path("/fake")), redis_url="redis://none", secret="s" * 16
    )
    phases: list[Phase] = []
    said: list[str] = []
    loaded = loaded_engine.LoadedEngine(
        config,
        1,
        SimpleNamespace(to=phases.append, describe=said.append),  # type: ignore[arg-type]
        SimpleNamespace(engine_failed=lambda error: None),  # type: ignore[arg-type]
        on_output=lambda output: None,
        on_chain=lambda chain: None,
    )
    loaded.start()
    assert await asyncio.wait_for(loaded.host.call(lambda engine: list(threads)), 60) == ["engine"]
    await loaded.stop()
    assert phases == [Phase.WARMING_UP] and said == ["warm"]
