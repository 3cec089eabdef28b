"""Errors that would leave a process of a router without supervision, or without its link."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from cluster.config.router import RouterConfig
from router.processes.parent import RouterProcesses, ending


def test_every_end_has_a_text() -> None:
    assert ending(3) == "ended with code 3"
    assert ending(-signal.SIGKILL) == "was ended by SIGKILL"
    assert ending(-40) == "was ended by signal 40"


async def test_a_process_that_is_not_supervised_ends_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    async def supervise(self: Any, index: int, first: asyncio.Future[None]) -> None:
        first.set_result(None)
        raise RuntimeError("a mistake")

    monkeypatch.setattr(RouterProcesses, "_supervise", supervise)
    running = RouterProcesses(RouterConfig(model=Path("m"), processes=2, http_port=0, grpc_port=0))
    await running.start()
    try:
        assert "a mistake" in await asyncio.wait_for(asyncio.shield(running.failed), 10)
    finally:
        await running.close()
