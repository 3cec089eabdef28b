"""Spans of an attempt at the prefill worker, recorded at its end under the router's span.

baton.prefill.queue    until its first step: its turn, a reservation, the step in progress
baton.prefill
 └─ baton.prefill.chunk     one per step
baton.handoff          from the first slot request to the decode worker's commit
 ├─ baton.handoff.part      requested → verified; granted in between
 └─ baton.handoff.exposed   the part of it after the end of prefill
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prefill_worker.attempt import PrefillAttempt
from worker.convert import outcome_name
from worker.telemetry import record_prefill

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from cluster.telemetry.tracing.spans import Tracing
    from wire import common_pb2


def record(tracing: Tracing, parent: Context, attempt: PrefillAttempt, end: common_pb2.AttemptEnd) -> None:
    now = time.monotonic()
    report = attempt.report
    facts: dict[str, str | int] = {
        "baton.worker": report.worker_id,
        "baton.outcome": outcome_name(end.outcome),
    }
    if not attempt.chunks:
        tracing.record(parent, "baton.prefill.queue", attempt.received, now, facts)
        return
    ended = record_prefill(tracing, parent, attempt.received, report, attempt.chunks, facts)
    if attempt.parts is not None:
        _handoff(tracing, parent, attempt, ended, now, facts)


def _handoff(
    tracing: Tracing,
    parent: Context,
    attempt: PrefillAttempt,
    prefill_ended: float,
    now: float,
    facts: dict[str, str | int],
) -> None:
    from cluster.telemetry.tracing.spans import Event

    assert attempt.parts is not None, "the caller checks"
    report, parts = attempt.report, list(attempt.parts)
    committed = prefill_ended + report.handoff_exposed_seconds if report.transport else now
    shipped: dict[str, str | int] = {
        "baton.bytes": report.kv_bytes_shipped,
        "baton.not_shipped_tokens": report.not_shipped_tokens,
        "baton.transport": report.transport,
        "baton.parts": len(parts) + attempt.parts.unnamed,
    }
    began = min((part.asked for part in parts), default=prefill_ended)
    span = tracing.record(parent, "baton.handoff", began, committed, {**facts, **shipped})
    for part in parts:
        of_part = {"baton.part": part.part, "baton.rank": part.target_rank, "baton.bytes": part.bytes}
        events = [Event("granted", part.granted)] if part.granted else []
        verified = part.verified or part.granted or part.asked
        tracing.record(span, "baton.handoff.part", part.asked, verified, of_part, events)
    if report.transport:
        tracing.record(span, "baton.handoff.exposed", prefill_ended, committed)
