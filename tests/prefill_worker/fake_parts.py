"""A stand-in for the RoleParts that PrefillRole uses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cluster.faults.points import NO_FAULTS
from tests.engine.fake_model import VOCAB
from worker.validate import SpecLimits


def fake_parts(
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
        health=SimpleNamespace(check_accepting=check_accepting),
        host=SimpleNamespace(call=call, has_grammar=lambda grammar, tenant: False),
        identity=SimpleNamespace(
            page_size=page_size,
            worker_id="p",
            spec_limits=SpecLimits("m", VOCAB, 8, 8192),
            check_epoch=check_epoch,
        ),
    )
