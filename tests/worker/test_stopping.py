"""The order in which a worker stops, also when a part of it cannot be closed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from worker.health import Phase
from worker.shutdown import Shutdown


class Parts:
    """The parts of a stopping worker; records their calls in order."""

    def __init__(self, failed: bool):
        self.did: list[str] = []
        self.has_failed = failed
        self.then = "exit"
        self.host = SimpleNamespace(healthy=lambda: not failed)

    def to(self, phase: Phase) -> None:
        self.did.append(phase.name.lower())

    def __getattr__(self, name: str) -> Any:
        async def do(*_: object) -> None:
            self.did.append(name)

        return do


def stopping(parts: Any, broken: str = "") -> Shutdown:
    def closer(name: str) -> Any:
        async def close() -> None:
            parts.did.append(name)
            if name == broken:
                raise RuntimeError("a defect")

        return close

    role: Any = SimpleNamespace(idle=lambda: True, closers=lambda: [closer("attempts"), closer("side")])
    config: Any = SimpleNamespace(worker_id="w", drain_migrate_seconds=1.0, drain_seconds=1.0)
    return Shutdown(
        config,
        role,
        health=parts,
        ending=parts,
        server=parts,
        membership=parts,
        engine=parts,
        close=closer("the rest"),
    )


DRAIN = ["draining", "set_serving", "set_draining"]


@pytest.mark.parametrize("failed", [True, False])
async def test_a_failed_worker_cuts_its_streams_off_first_and_silent_ranks_before_anything_waits(failed):
    parts = Parts(failed)
    await stopping(parts).stop()
    first = ["stop"] if failed else []
    assert parts.did == [*first, *DRAIN, "end_silent_ranks", "attempts", "side", "the rest"]


@pytest.mark.parametrize("broken", ["attempts", "side"])
async def test_a_part_that_cannot_be_closed_does_not_keep_others_from_closing(broken):
    parts = Parts(failed=False)
    await stopping(parts, broken).stop()
    assert parts.did[-3:] == ["attempts", "side", "the rest"]
