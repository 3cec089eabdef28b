"""Metrics by tenant. Who a tenant is, operators decide, in the file of keys: still, only the first ones get series."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.telemetry.histogram import Histogram

MAX_TENANTS = 64
OTHER = "other"  # all beyond them, together
NOBODY = "none"  # without keys everyone is the same nameless tenant
TENANT_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
RESULTS = ("ok", "cancelled", "refused", "failed")


@dataclass
class Tenant:
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RESULTS, 0))
    in_flight: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token: Histogram = field(default_factory=lambda: Histogram(TENANT_SECONDS))


def result_of(outcome: str) -> str:
    """baton_requests_total's outcome, in four words."""
    if outcome in ("ok", "cancelled"):
        return outcome
    return "refused" if outcome in ("overloaded", "refused", "OverloadedError") else "failed"


class Tenants(Collector):
    def __init__(self, max_tenants: int = MAX_TENANTS):
        self._max_tenants = max_tenants
        self._tenants: dict[str, Tenant] = {}

    def of(self, name: str) -> Tenant:
        """The tenant's account, or the common one of those that came too late for their own."""
        name = name or NOBODY
        known = self._tenants.get(name)
        if known is None:
            if len(self._tenants) >= self._max_tenants:
                name = OTHER
            known = self._tenants.setdefault(name, Tenant())
        return known

    def collect(self) -> Iterator[Metric]:
        yield self._requests()
        yield self._counter("prompt_tokens", "Prompt tokens", {n: t.prompt_tokens for n, t in self._all()})
        yield self._counter(
            "prefix_cache_hits", "Prompt tokens nobody computed", {n: t.cached_tokens for n, t in self._all()}
        )
        yield self._counter("generation_tokens", "Tokens sent", {n: t.output_tokens for n, t in self._all()})
        in_flight = GaugeMetricFamily(
            "baton_tenant_requests_in_flight", "Requests now in the router", labels=["tenant"]
        )
        first_token = HistogramMetricFamily(
            "baton_tenant_time_to_first_token_seconds", "Time to first token", labels=["tenant"]
        )
        for name, tenant in self._all():
            in_flight.add_metric([name], tenant.in_flight)
            first_token.add_metric([name], tenant.first_token.buckets(), tenant.first_token.sum)
        yield in_flight
        yield first_token

    def _all(self) -> list[tuple[str, Tenant]]:
        return list(self._tenants.items())

    def _requests(self) -> Metric:
        family = CounterMetricFamily(
            "baton_tenant_requests", "Requests by how they ended", labels=["tenant", "result"]
        )
        for name, tenant in self._all():
            for result, count in tenant.requests.items():
                family.add_metric([name, result], count)
        return family

    @staticmethod
    def _counter(what: str, help_text: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"baton_tenant_{what}", help_text, labels=["tenant"])
        for name, value in values.items():
            family.add_metric([name], value)
        return family
