"""The router's metrics of requests, in vLLM's words where it has one; base units."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge

from cluster.errors import BatonError
from cluster.telemetry.histogram import (
    STAGE_SECONDS,
    TOKEN_COUNTS,
    TOKEN_SECONDS,
    Histogram,
    HistogramFamily,
    shown,
)
from router.dispatch.dispatcher import RequestDispatcher
from router.observe.tenants import Tenants, result_of
from router.request.completion import Outcome

_STAGES = (
    "router_queue",
    "placement",
    "prefill_queue",
    "prefill",
    "router_trip",
    "handoff_exposed",
    "decode_queue",
    "first_step",
    "decode",
)
_OUTCOMES = (
    *("ok", "cancelled", "overloaded", "refused"),
    *("InvalidRequestError", "OverloadedError", "UnavailableError", "DeadlineError", "InternalError"),
)
_RETRIES = ("PeerLostError", "BlocksExhaustedError", "UnavailableError", "StaleEpochError", "InternalError")


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry):
        self.registry = registry
        self.tenants = Tenants()
        registry.register(self.tenants)
        self.requests = Counter(
            "baton_requests_total", "Requests by how they ended", ["outcome"], registry=registry
        )
        for outcome in _OUTCOMES:  # a series that appears with its first increase hides it from rate()
            self.requests.labels(outcome)
        self.in_flight = Gauge("baton_requests_in_flight", "Requests now in the router", registry=registry)
        self._histograms(registry)
        self._counters(registry)

    def _histograms(self, registry: CollectorRegistry) -> None:
        self.e2e = Histogram(STAGE_SECONDS)
        self.ttft = Histogram(TOKEN_SECONDS)
        self.tpot = Histogram(TOKEN_SECONDS)
        self.prompt_lengths = Histogram(TOKEN_COUNTS)
        self.output_lengths = Histogram(TOKEN_COUNTS)
        stages = HistogramFamily("baton_stage_seconds", "Seconds by stage", STAGE_SECONDS, ["stage"])
        self._stages = [(f"{stage}_seconds", stages.of(stage)) for stage in _STAGES]
        for family in (
            stages,
            shown("baton_e2e_request_latency_seconds", "Whole requests", self.e2e),
            shown("baton_time_to_first_token_seconds", "Time to first token", self.ttft),
            shown(
                "baton_request_time_per_output_token_seconds",
                "Of each request, the first token left out",
                self.tpot,
            ),
            shown("baton_request_prompt_tokens", "Prompt tokens of each request", self.prompt_lengths),
            shown("baton_request_generation_tokens", "Tokens sent for each request", self.output_lengths),
        ):
            registry.register(family)

    def _counters(self, registry: CollectorRegistry) -> None:
        def counter(name: str, help_text: str) -> Counter:
            return Counter(name, help_text, registry=registry)

        self.prompt_tokens = counter("baton_prompt_tokens_total", "Prompt tokens")
        self.asked_tokens = counter("baton_prefix_cache_queries_total", "Prompt tokens of placed requests")
        self.cached_tokens = counter("baton_prefix_cache_hits_total", "Prompt tokens that nobody computed")
        self.output_tokens = counter("baton_generation_tokens_total", "Tokens sent")
        self.shipped = counter("baton_kv_shipped_bytes_total", "KV handed over")
        self.not_shipped = counter(
            "baton_kv_not_shipped_tokens_total", "Prompt tokens the decode worker already held"
        )
        self.attempts = counter("baton_attempts_total", "Dispatch attempts")
        self.placements = counter("baton_placement_calls_total", "Placement calls")
        self.retries = Counter(
            "baton_retries_total", "Attempts that did not end their request", ["reason"], registry=registry
        )
        for reason in _RETRIES:
            self.retries.labels(reason)

    def overloaded(self, tenant: str) -> None:
        """Refused before anything was done: a limit of requests in flight."""
        self.requests.labels("overloaded").inc()
        self.tenants.of(tenant).requests["refused"] += 1

    @contextlib.contextmanager
    def request(self, dispatcher: RequestDispatcher) -> Iterator[None]:
        began = time.monotonic()
        tenant = self.tenants.of(dispatcher.tenant)
        self.in_flight.inc()
        tenant.in_flight += 1
        outcome = "cancelled"
        try:
            yield
            if dispatcher.failure is not None:  # told on the stream, which by then had begun
                outcome = type(dispatcher.failure).__name__
            elif dispatcher.complete:
                outcome = "ok"
        except BatonError as error:
            outcome = type(error).__name__
            raise
        finally:
            self.in_flight.dec()
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
        self.output_tokens.inc(usage.completion_tokens)
        tenant.prompt_tokens += usage.prompt_tokens
        tenant.cached_tokens += usage.cached_tokens
        tenant.output_tokens += usage.completion_tokens
        if timings.attempts:
            self.asked_tokens.inc(usage.prompt_tokens)
        self.shipped.inc(timings.kv_bytes_shipped)
        self.not_shipped.inc(timings.not_shipped_tokens)
        self.attempts.inc(timings.attempts)
        self.placements.inc(timings.placement_calls)
        for reason, count in dispatcher.stats.retries.items():
            self.retries.labels(reason).inc(count)
