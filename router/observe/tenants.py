"""Metrics by tenant. Tenants come from the operator's file of keys; still, only the first MAX_TENANTS get series."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.telemetry.histogram import Histogram
from cluster.telemetry.metrics import router as declared
from cluster.telemetry.scrape import ScrapeCollector

MAX_TENANTS = 64
OTHER = "other"  # all further ones, together
NO_TENANT = "none"  # without keys every request belongs to one nameless tenant
RESULTS = ("ok", "cancelled", "refused", "failed")


@dataclass
class Tenant:
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RESULTS, 0))
    in_flight: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token: Histogram = field(default_factory=declared.TENANT_TTFT.create)


def result_of(outcome: str) -> str:
    """One of RESULTS, from an outcome of baton_requests_total."""
    if outcome in ("ok", "cancelled"):
        return outcome
    return "refused" if outcome in ("overloaded", "refused", "OverloadedError") else "failed"


class Tenants(Collector):
    def __init__(self, max_tenants: int = MAX_TENANTS):
        self._max_tenants = max_tenants
        self._tenants: dict[str, Tenant] = {}
        each = self._all
        self._counts = ScrapeCollector(
            [
                declared.TENANT_REQUESTS.read(self._requests),
                declared.TENANT_PROMPT_TOKENS.read(lambda: {n: t.prompt_tokens for n, t in each()}),
                declared.TENANT_PREFIX_CACHE_HITS.read(lambda: {n: t.cached_tokens for n, t in each()}),
                declared.TENANT_GENERATION_TOKENS.read(lambda: {n: t.output_tokens for n, t in each()}),
                declared.TENANT_REQUESTS_IN_FLIGHT.read(lambda: {n: t.in_flight for n, t in each()}),
            ]
        )

    def of(self, name: str) -> Tenant:
        """The tenant's counts, or the common ones of tenants beyond the limit."""
        name = name or NO_TENANT
        known = self._tenants.get(name)
        if known is None:
            if len(self._tenants) >= self._max_tenants:
                name = OTHER
            known = self._tenants.setdefault(name, Tenant())
        return known

    def collect(self) -> Iterator[Metric]:
        yield from self._counts.collect()
        first_token = declared.TENANT_TTFT.create_family()
        for name, tenant in self._all():
            first_token.adopt(tenant.first_token, name)
        yield from first_token.collect()

    def _requests(self) -> dict[tuple[str, ...], float]:
        return {(name, result): n for name, one in self._all() for result, n in one.requests.items()}

    def _all(self) -> list[tuple[str, Tenant]]:
        return list(self._tenants.items())
