"""Spans of an attempt at the decode worker, recorded at its end under the router's span.

baton.handoff.land       from Reserve to the commit
baton.decode.queue       until a step takes it
baton.decode             from that step to the last token
 └─ baton.decode.first_step

Local prefill: baton.prefill.queue, baton.prefill and its chunks in place of the first two.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from decode_worker.attempt import DecodeAttempt
from worker.convert import outcome_name
from worker.telemetry import record_prefill

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from cluster.telemetry.tracing.spans import Tracing
    from wire import common_pb2


def record(
    tracing: Tracing,
    parent: Context,
    attempt: DecodeAttempt,
    outcome: common_pb2.AttemptOutcome.ValueType,
) -> None:
    now, report = time.monotonic(), attempt.report
    facts: dict[str, str | int] = {"baton.worker": report.worker_id, "baton.outcome": outcome_name(outcome)}
    if attempt.reserved:
        landed = attempt.entered if attempt.is_entered else now
        kept = {"baton.not_shipped_tokens": report.not_shipped_tokens}
        tracing.record(parent, "baton.handoff.land", attempt.reserved, landed, {**facts, **kept})
    if not attempt.is_entered:
        return
    if attempt.local_prefill:
        began = record_prefill(tracing, parent, attempt.received, report, attempt.chunks, facts)
    else:
        began = attempt.entered + report.decode_queue_seconds
        tracing.record(parent, "baton.decode.queue", attempt.entered, began, facts)
    if attempt.first_token is None:
        return
    decoded = {"baton.tokens": attempt.log.count, "baton.choices": attempt.choices}
    decode = tracing.record(parent, "baton.decode", began, now, {**facts, **decoded})
    if not attempt.local_prefill:
        tracing.record(decode, "baton.decode.first_step", began, attempt.first_token)
