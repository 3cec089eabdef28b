"""A stand-in for WorkerCore with what PrefillRole uses of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cluster.faults.points import NO_FAULTS
from tests.engine.fake_model import VOCAB
from worker.validate import SpecLimits


def fake_core(
    call: Callable[[Callable[[Any], Any]], Any],
    *,
    max_batch_tokens: int,
    page_size: int,
    check_epoch: Callable[[int], None] = lambda epoch: None,
    check_accepting: Callable[[], None] = lambda: None,
) -> Any:
    """`call` runs a function on the engine, as `EngineHost.call` does. By default no epoch is refused."""
    return SimpleNamespace(
        config=SimpleNamespace(
            engine=SimpleNamespace(max_batch_tokens=max_batch_tokens),
            batch_aging_seconds=30.0,
            max_queued_requests=32,
            secret="s",
        ),
        faults=NO_FAULTS,
        tracing=None,
        trace_of=lambda spec: None,
        beat_step=lambda: 1,
        check_epoch=check_epoch,
        check_accepting=check_accepting,
        host=SimpleNamespace(call=call),
        page_size=page_size,
        worker_id="p",
        spec_limits=SpecLimits("m", VOCAB, 8),
    )
