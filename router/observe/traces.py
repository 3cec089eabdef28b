"""The router's spans of one request.

baton.request
 ├─ baton.router      from its arrival until it is placed: parsing, tokens, validation, its tenant's quota
 ├─ baton.placement   one per attempt
 └─ baton.attempt     one per attempt; parent of the workers' spans
     └─ baton.router  time of the first token beyond the worker's own: the trip there and back. Shown at the attempt's
                      beginning: half of it lies at the end, but clocks of two machines are not compared
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.errors import BatonError
from router.placement.types import Placed
from router.request.completion import Completion, Outcome

if TYPE_CHECKING:
    from cluster.telemetry.tracing.spans import OpenSpan, Tracing
    from wire import common_pb2

# Results of requests that are no failure.
_EXPECTED = frozenset({"ok", "cancelled", "InvalidRequestError", "OverloadedError"})


def _nothing(name: str) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Arrival:
    """When a request arrived, and the trace that its headers name.

    `values(name)`: of a header, or of a metadata entry; read only where requests are traced."""

    values: Callable[[str], Sequence[str]] = _nothing
    received: float = field(default_factory=time.monotonic)

    @property
    def trace_headers(self) -> dict[str, str]:
        """The headers that name the request's trace, by W3C's rules: a second traceparent makes both invalid, several
        tracestates are one list."""
        parents = self.values("traceparent")
        if len(parents) != 1:
            return {}
        return {"traceparent": parents[0], "tracestate": ",".join(self.values("tracestate"))}


class RequestTrace:
    """The trace of a request that is sampled."""

    def __init__(self, tracing: Tracing, root: OpenSpan, received: float):
        self._tracing = tracing
        self._root = root
        self._received = received
        self._placed = 0
        self.trace_id = root.trace_id

    @classmethod
    def begin(cls, tracing: Tracing, arrival: Arrival, completion: Completion) -> RequestTrace | None:
        root = tracing.root("baton.request", arrival.trace_headers, arrival.received)
        if root is None:
            return None
        root.set(
            {
                "baton.request_id": completion.request_id,
                "baton.tenant": completion.tenant,
                "baton.priority": completion.priority,
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": completion.model,
                "gen_ai.usage.input_tokens": len(completion.prompt_tokens),
            }
        )
        return cls(tracing, root, arrival.received)

    def placed(self, began: float, ended: float, placed: Placed, spec: common_pb2.GenerateSpec) -> OpenSpan:
        """Open the attempt's span, and write its context into `spec`, which goes to the workers."""
        context = self._root.context
        if not self._placed:
            self._tracing.record(context, "baton.router", self._received, began, {"baton.part": "intake"})
        self._placed += 1
        facts: dict[str, str | int] = {
            "baton.prefill_worker": placed.prefill.worker_id if placed.prefill is not None else "",
            "baton.decode_worker": placed.decode.worker_id,
            "baton.cached_tokens": placed.cached_prefill_tokens,
            "baton.from_redis": placed.from_redis,
        }
        self._tracing.record(context, "baton.placement", began, ended, facts)
        span = self._tracing.open(context, "baton.attempt", ended, {**facts, "baton.attempt": self._placed})
        headers = span.headers
        spec.trace_parent, spec.trace_state = headers["traceparent"], headers.get("tracestate", "")
        return span

    def attempt_over(self, span: OpenSpan | None, started: float, trip_seconds: float | None) -> None:
        if span is None:
            return
        if trip_seconds is not None:
            part = {"baton.part": "trip"}
            self._tracing.record(span.context, "baton.router", started, started + trip_seconds, part)
        span.end()

    def finish(self, result: str, outcome: Outcome, first_token_seconds: float | None) -> None:
        """`result`: as in baton_requests_total."""
        root = self._root
        root.set(
            {
                "baton.outcome": result,
                "baton.attempts": outcome.timings.attempts,
                "baton.cached_tokens": outcome.usage.cached_tokens,
                "gen_ai.usage.output_tokens": outcome.usage.completion_tokens,
            }
        )
        if first_token_seconds is not None:
            root.set({"baton.time_to_first_token_seconds": first_token_seconds})
        if result not in _EXPECTED:
            root.failed(result)
        root.end()


def failed(span: OpenSpan | None, error: BatonError) -> None:
    """Record why the attempt failed."""
    if span is not None:
        span.failed(type(error).__name__)
