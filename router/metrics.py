"""The router's metrics, in vLLM's words where it has one; base units."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster.errors import BatonError
from router.completion import Outcome
from router.dispatch.life import RequestLife

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STAGES = (
    "router_queue",
    "placement",
    "prefill_queue",
    "prefill",
    "handoff_exposed",
    "decode_queue",
    "decode",
)


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry):
        self.registry = registry
        self.requests = Counter(
            "baton_requests_total", "Requests by how they ended", ["outcome"], registry=registry
        )
        self.in_flight = Gauge("baton_requests_in_flight", "Requests now in the router", registry=registry)
        self.e2e = Histogram(
            "baton_e2e_request_latency_seconds", "Whole requests", buckets=_SECONDS, registry=registry
        )
        self.stages = Histogram(
            "baton_stage_seconds", "Seconds by stage", ["stage"], buckets=_SECONDS, registry=registry
        )
        self._stage_fields = [(f"{stage}_seconds", self.stages.labels(stage)) for stage in _STAGES]
        self.ttft = Histogram(
            "baton_time_to_first_token_seconds", "Time to first token", buckets=_SECONDS, registry=registry
        )
        self.itl = Histogram(
            "baton_inter_token_latency_seconds", "Between tokens", buckets=_SECONDS, registry=registry
        )
        self.prompt_tokens = Counter("baton_prompt_tokens_total", "Prompt tokens", registry=registry)
        self.cached_tokens = Counter(
            "baton_prefix_cache_hits_total", "Prompt tokens that nobody computed", registry=registry
        )
        self.output_tokens = Counter("baton_generation_tokens_total", "Tokens sent", registry=registry)
        self.shipped = Counter("baton_kv_shipped_bytes_total", "KV handed over", registry=registry)
        self.attempts = Counter("baton_attempts_total", "Dispatch attempts", registry=registry)
        self.placements = Counter("baton_placement_calls_total", "Placement calls", registry=registry)

    @contextlib.contextmanager
    def request(self, life: RequestLife) -> Iterator[None]:
        began = time.monotonic()
        self.in_flight.inc()
        outcome = "cancelled"
        try:
            yield
            outcome = "ok" if life.complete else "cancelled"
        except BatonError as error:
            outcome = type(error).__name__
            raise
        finally:
            self.in_flight.dec()
            self.requests.labels(outcome).inc()
            self.e2e.observe(time.monotonic() - began)
            if life.first_token_seconds is not None:
                self.ttft.observe(life.first_token_seconds)
            self._count(life.outcome)

    def _count(self, outcome: Outcome) -> None:
        for name, stage in self._stage_fields:
            stage.observe(getattr(outcome.timings, name))
        self.prompt_tokens.inc(outcome.usage.prompt_tokens)
        self.cached_tokens.inc(outcome.usage.cached_tokens)
        self.output_tokens.inc(outcome.usage.completion_tokens)
        self.shipped.inc(outcome.timings.kv_bytes_shipped)
        self.attempts.inc(outcome.timings.attempts)
        self.placements.inc(outcome.timings.placement_calls)
