"""The order in which a worker stops, also when a part of it cannot be closed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from worker.leaving import Leaving


class Stopped:
    """Records the calls of a stopping worker, in order."""

    def __init__(self, failed: bool):
        self.did: list[str] = []
        self.has_failed = failed
        self.engine_healthy = lambda: not failed

    def __getattr__(self, name: str) -> Any:
        async def do() -> None:
            self.did.append(name)

        return do


def stopping(worker: Any, broken: str = "") -> Leaving:
    def closer(name: str) -> Any:
        async def close() -> None:
            worker.did.append(name)
            if name == broken:
                raise RuntimeError("a defect")

        return close

    role: Any = SimpleNamespace(idle=lambda: True, closers=lambda: [closer("attempts"), closer("side")])
    config: Any = SimpleNamespace(worker_id="w", drain_migrate_seconds=1.0, drain_seconds=1.0)
    return Leaving(config, worker, role)


@pytest.mark.parametrize("failed", [True, False])
async def test_a_failed_worker_cuts_its_streams_off_first_and_silent_ranks_before_anything_waits(failed):
    worker = Stopped(failed)
    await stopping(worker).stop()
    first = ["cut_off"] if failed else []
    assert worker.did == [*first, "start_draining", "end_silent_ranks", "attempts", "side", "close"]


@pytest.mark.parametrize("broken", ["attempts", "side"])
async def test_a_part_that_cannot_be_closed_leaves_the_others_to_be_closed(broken):
    worker = Stopped(failed=False)
    await stopping(worker, broken).stop()
    assert worker.did[-3:] == ["attempts", "side", "close"]
