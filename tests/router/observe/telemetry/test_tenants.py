"""With any number of tenants, the series stay bounded and their sum is complete."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.observe.tenants import OTHER, Tenants, result_of


def test_tenants_beyond_the_limit_share_one_account() -> None:
    tenants = Tenants(max_tenants=3)
    for number in range(10):
        for _ in range(2):
            tenant = tenants.of(f"tenant-{number}" if number else "")
            tenant.requests["ok"] += 1
            tenant.first_token.observe(0.2)
    registry = CollectorRegistry()
    registry.register(tenants)
    parsed = {f.name: f for f in text_string_to_metric_families(generate_latest(registry).decode())}
    done = {
        s.labels["tenant"]: s.value
        for s in parsed["baton_tenant_requests"].samples
        if s.labels["result"] == "ok"
    }
    assert done == {"none": 2, "tenant-1": 2, "tenant-2": 2, OTHER: 14}


def test_each_outcome_counts_as_one_of_four_results() -> None:
    said = {
        name: result_of(name)
        for name in ("ok", "cancelled", "overloaded", "OverloadedError", "InternalError")
    }
    assert list(said.values()) == ["ok", "cancelled", "refused", "refused", "failed"]
