"""The order in which a worker stops, also when a part of it cannot be closed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import InternalError
from worker.role_worker import RoleWorker


class Core:
    """Records the calls of a stopping worker, in order."""

    def __init__(self, failed: bool):
        self.did: list[str] = []
        self.failed = asyncio.get_running_loop().create_future()
        if failed:
            self.failed.set_result(InternalError("rank 1 has died"))
        self.worker_id = "w"
        self.host = SimpleNamespace(healthy=lambda: not failed)
        self.config = SimpleNamespace(drain_migrate_seconds=1.0, drain_seconds=1.0)

    def __getattr__(self, name: str) -> Any:
        async def do() -> None:
            self.did.append(name)

        return do


def stopping(core: Any, broken: str = "") -> RoleWorker:
    def part(name: str) -> Any:
        async def close() -> None:
            core.did.append(name)
            if name == broken:
                raise RuntimeError("a defect")

        return SimpleNamespace(close=close)

    role: Any = SimpleNamespace(idle=lambda: True, failed=lambda word: None)
    return RoleWorker(core, role, part("attempts"), part("side"))


@pytest.mark.parametrize("failed", [True, False])
async def test_a_failed_worker_cuts_its_streams_off_first_and_silent_ranks_before_anything_waits(failed):
    core = Core(failed)
    await stopping(core).stop()
    first = ["cut_off"] if failed else []
    assert core.did == [*first, "start_draining", "end_silent_ranks", "attempts", "side", "stop"]


@pytest.mark.parametrize("broken", ["attempts", "side"])
async def test_a_part_that_cannot_be_closed_leaves_the_others_to_be_closed(broken):
    core = Core(failed=False)
    await stopping(core, broken).stop()
    assert core.did[-3:] == ["attempts", "side", "stop"]


async def test_a_worker_that_has_failed_is_not_healthy_though_its_engine_moves():
    core = Core(failed=True)
    core.host.healthy = lambda: True
    assert not stopping(core).healthy()
    assert stopping(Core(failed=False)).healthy()
