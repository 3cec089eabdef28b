"""Sums over all attempts at a request, reported at its end."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.errors import BatonError
from cluster.telemetry.logs import is_logged
from router.dispatch.choice import ChoiceStream
from router.dispatch.retry_policy import OVERLOAD
from router.request.completion import Completion, Outcome
from wire import common_pb2, inference_pb2

log = logging.getLogger(__name__)


@dataclass
class RequestStats:
    """Counts of one request; each attempt adds to them."""

    attempts: int = 0
    begun: bool = False  # the client has a token of any choice, or log probabilities of the prompt
    placement_calls: int = 0
    placement_seconds: float = 0.0
    trip_seconds: float = 0.0  # of the attempt that brought the latest first token
    prefill: common_pb2.WorkReport = field(default_factory=common_pb2.WorkReport)
    decode: common_pb2.WorkReport = field(default_factory=common_pb2.WorkReport)
    first_cached: int | None = None
    bytes_shipped: int = 0
    explanations: list[dict[str, object]] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)  # by the error's class

    def retry(self, reason: BatonError, request_id: str) -> None:
        """Count and log the end of an attempt. Full workers may refuse a request a hundred times: few of
        these ends are logged."""
        kind = type(reason).__name__
        self.retries[kind] += 1
        count = self.retries[kind]
        if not isinstance(reason, OVERLOAD) or is_logged(count):
            log.info(
                "attempt failed: %s (%s, number %d of this request)",
                reason,
                kind,
                count,
                extra={"request_id": request_id},
            )

    def keep(self, report: common_pb2.WorkReport, *, of_prefill: bool) -> None:
        """Add a worker's report of an attempt. The request's cached tokens are those of the first worker that computed its
        prompt."""
        if of_prefill:
            self.prefill = report
        else:
            self.decode = report
        self.bytes_shipped += report.kv_bytes_shipped
        if self.first_cached is None and (report.computed_prompt_tokens or report.cached_tokens):
            self.first_cached = report.cached_tokens

    def outcome(
        self,
        completion: Completion,
        choices: Sequence[ChoiceStream],
        *,
        queue_seconds: float,
        total_seconds: float,
    ) -> Outcome:
        p, d = self.prefill, self.decode
        usage = inference_pb2.Usage(
            prompt_tokens=len(completion.prompt_tokens),
            completion_tokens=0 if completion.prompt_only else sum(len(choice.output) for choice in choices),
            reasoning_tokens=sum(choice.reasoning_tokens for choice in choices),
            cached_tokens=min(self.first_cached or 0, len(completion.prompt_tokens)),
        )
        timings = inference_pb2.Timings(
            router_queue_seconds=queue_seconds,
            placement_seconds=self.placement_seconds,
            prefill_queue_seconds=p.prefill_queue_seconds + d.prefill_queue_seconds,
            prefill_seconds=p.prefill_seconds + d.prefill_seconds,
            handoff_exposed_seconds=p.handoff_exposed_seconds,
            decode_queue_seconds=d.decode_queue_seconds,
            first_step_seconds=d.first_step_seconds,
            router_trip_seconds=self.trip_seconds,
            decode_seconds=d.decode_seconds,
            total_seconds=total_seconds,
            kv_bytes_shipped=self.bytes_shipped,
            not_shipped_tokens=p.not_shipped_tokens,
            transport=p.transport,
            prefill_worker=p.worker_id or d.worker_id,
            decode_worker=d.worker_id,
            attempts=self.attempts,
            placement_calls=self.placement_calls,
        )
        return Outcome(usage, timings, json.dumps(self.explanations) if completion.explain else "")
