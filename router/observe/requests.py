"""The router's metrics of requests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry

from cluster.errors import BatonError
from cluster.telemetry.metrics import declaration
from cluster.telemetry.metrics import router as declared
from router.dispatch.dispatcher import RequestDispatcher
from router.observe.tenants import Tenants, result_of
from router.request.completion import Outcome
from wire.inference_pb2 import Timings

_SECONDS = [field.name for field in Timings.DESCRIPTOR.fields if field.name.endswith("_seconds")]
_STAGES = [name.removesuffix("_seconds") for name in _SECONDS if name != "total_seconds"]
_OUTCOMES = (
    *("ok", "cancelled", "overloaded", "refused"),
    *("InvalidRequestError", "OverloadedError", "UnavailableError", "DeadlineError", "InternalError"),
)
_RETRIES = (
    "PeerLostError",
    "BlocksExhaustedError",
    "UnavailableError",
    "StaleEpochError",
    "InternalError",
    "AdapterMissingError",
)


# Counted at the end of each request
_TOTALS: tuple[tuple[declaration.Counter, Callable[[Outcome], float]], ...] = (
    (
        declared.PREFIX_CACHE_QUERIES,
        lambda outcome: outcome.usage.prompt_tokens if outcome.timings.attempts else 0,
    ),
    (declared.GENERATION_TOKENS, lambda outcome: outcome.usage.completion_tokens),
    (declared.KV_SHIPPED_BYTES, lambda outcome: outcome.timings.kv_bytes_shipped),
    (declared.KV_NOT_SHIPPED_TOKENS, lambda outcome: outcome.timings.not_shipped_tokens),
    (declared.ATTEMPTS, lambda outcome: outcome.timings.attempts),
    (declared.PLACEMENT_CALLS, lambda outcome: outcome.timings.placement_calls),
)


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry):
        self.registry = registry
        self.tenants = Tenants()
        self.requests = declared.REQUESTS.create(registry, _OUTCOMES)
        self.in_flight = declared.REQUESTS_IN_FLIGHT.create(registry)
        self.retries = declared.RETRIES.create(registry, _RETRIES)
        self.prompt_tokens = declared.PROMPT_TOKENS.create(registry)
        self.cached_tokens = declared.PREFIX_CACHE_HITS.create(registry)
        self._totals = [(metric.create(registry), read) for metric, read in _TOTALS]
        self.e2e = declared.E2E.create(registry)
        self.ttft = declared.TTFT.create(registry)
        self.tpot = declared.TPOT.create(registry)
        self.prompt_lengths = declared.REQUEST_PROMPT_TOKENS.create(registry)
        self.output_lengths = declared.REQUEST_GENERATION_TOKENS.create(registry)
        stages = declared.STAGES.create_family()
        self._stages = [(f"{stage}_seconds", stages.of(stage)) for stage in _STAGES]
        registry.register(self.tenants)
        registry.register(stages)

    def overloaded(self, tenant: str) -> None:
        """A request was refused by a limit of requests in flight or of bytes."""
        self.requests.labels("overloaded").inc()
        self.tenants.of(tenant).requests["refused"] += 1

    @contextlib.contextmanager
    def request(self, dispatcher: RequestDispatcher) -> Iterator[None]:
        began = time.monotonic()
        tenant = self.tenants.of(dispatcher.tenant)
        tenant.in_flight += 1
        outcome = "cancelled"
        try:
            yield
            if dispatcher.failure is not None:  # reported on a stream that had begun
                outcome = type(dispatcher.failure).__name__
            elif dispatcher.complete:
                outcome = "ok"
        except BatonError as error:
            outcome = type(error).__name__
            raise
        finally:
            tenant.in_flight -= 1
            tenant.requests[result_of(outcome)] += 1
            self.requests.labels(outcome).inc()
            self.e2e.observe(time.monotonic() - began, dispatcher.trace_id)
            self._count(dispatcher, dispatcher.outcome)
            dispatcher.finish_trace(outcome)

    def _count(self, dispatcher: RequestDispatcher, outcome: Outcome) -> None:
        usage, timings, trace_id = outcome.usage, outcome.timings, dispatcher.trace_id
        for name, stage in self._stages:
            stage.observe(getattr(timings, name), trace_id)
        tenant = self.tenants.of(dispatcher.tenant)
        first = dispatcher.first_token_seconds
        if first is not None:
            self.ttft.observe(first, trace_id)
            tenant.first_token.observe(first)
            if usage.completion_tokens > 1:
                seconds = (timings.total_seconds - first) / (usage.completion_tokens - 1)
                self.tpot.observe(seconds, trace_id)
        self.prompt_lengths.observe(usage.prompt_tokens)
        self.output_lengths.observe(usage.completion_tokens)
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_tokens.inc(usage.cached_tokens)
        for total, read in self._totals:
            total.inc(read(outcome))
        tenant.prompt_tokens += usage.prompt_tokens
        tenant.cached_tokens += usage.cached_tokens
        tenant.output_tokens += usage.completion_tokens
        for reason, count in dispatcher.stats.retries.items():
            self.retries.labels(reason).inc(count)
