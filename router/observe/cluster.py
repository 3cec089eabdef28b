"""What a router shows of its view of the cluster: workers, placement, Redis, its own limits."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from cluster.membership.topology import LEVELS
from cluster.telemetry.histogram import STAGE_SECONDS, Histogram, HistogramFamily, shown
from cluster.telemetry.scrape import ScrapeCollector, ScrapedMetric, counter, gauge

if TYPE_CHECKING:
    from router.dispatch.services import Services

_LEASES = ("live", "suspect", "dead")


def collectors(services: Services, loop_lag: Histogram) -> list[Collector]:
    calls = HistogramFamily(
        "baton_redis_call_seconds",
        "Calls that a request waits for",
        services.placement.seconds.bounds,
        ["call"],
    )
    calls.adopt(services.placement.seconds, "place")
    calls.adopt(services.quota.seconds, "quota")
    costs = HistogramFamily(
        "baton_placement_cost_seconds",
        "As the cost model expected it of the workers it chose, by term",
        STAGE_SECONDS,
        ["term"],
    )
    for term, histogram in services.placement.cost_terms.items():
        costs.adopt(histogram, term)
    return [
        calls,
        costs,
        shown("baton_inter_token_latency_seconds", "Between tokens", services.inter_token_seconds),
        shown("baton_event_loop_lag_seconds", "How late the event loop runs its timers", loop_lag),
        ScrapeCollector([*_cluster(services), *_placement(services), *_redis(services)]),
    ]


def _cluster(services: Services) -> list[ScrapedMetric]:
    members, config = services.members, services.config
    return [
        gauge("baton_workers", "Registered workers", lambda: _workers(services), "role", "lease"),
        gauge("baton_workers_draining", "Workers that take nothing new", lambda: _draining(services), "role"),
        gauge(
            "baton_workers_suspect",
            "Workers that have been silent on streams of ours",
            services.liveness.silent,
        ),
        gauge(
            "baton_membership_age_seconds",
            "Since the membership was read",
            lambda: time.monotonic() - members.refreshed,
        ),
        gauge(
            "baton_requests_limit",
            "Requests that may be in flight here",
            lambda: config.max_concurrent_requests,
        ),
    ]


def _workers(services: Services) -> Counter[tuple[str, ...]]:
    """Zeros too: an alert on none must have a series."""
    roles = ("prefill", "decode")
    count: Counter[tuple[str, ...]] = Counter({(role, lease): 0 for role in roles for lease in _LEASES})
    count.update((worker.role, worker.lease) for worker in services.members.all)
    return count


def _draining(services: Services) -> Counter[str]:
    count: Counter[str] = Counter({"prefill": 0, "decode": 0})
    count.update(worker.role for worker in services.members.all if worker.state == "draining")
    return count


def _placement(services: Services) -> list[ScrapedMetric]:
    placement = services.placement
    calibration = placement.calibration
    return [
        counter(
            "baton_placements", "By who prefills and who decided", lambda: placement.decided, "prefill", "by"
        ),
        counter("baton_placements_refused", "Placed nowhere, by reason", lambda: placement.refused, "reason"),
        gauge(
            "baton_placement_charged_tokens",
            "Placed from here and not done yet",
            placement.charged_tokens,
            "stage",
        ),
        gauge(
            "baton_placement_learned_prefill_seconds_per_token",
            "As the cost model learned it",
            lambda: calibration.a,
        ),
        gauge(
            "baton_placement_learned_bandwidth_bytes_per_second",
            "As the cost model learned or assumes it, by what a pair shares at least",
            lambda: dict(zip(LEVELS, calibration.rates(), strict=True)),
            "level",
        ),
    ]


def _redis(services: Services) -> list[ScrapedMetric]:
    placement, quota = services.placement, services.quota
    return [
        gauge(
            "baton_redis_memory_used_bytes",
            "Redis' used_memory; above 0.7 of its maxmemory placements are not predicted",
            lambda: placement.memory.used_bytes,
        ),
        gauge(
            "baton_redis_memory_max_bytes",
            "Redis' maxmemory; 0 = not set",
            lambda: placement.memory.max_bytes,
        ),
        gauge(
            "baton_redis_evicts_index_only",
            "1 while Redis' maxmemory-policy is one of volatile-…, which evicts the prefix index only",
            lambda: placement.memory.evicts_index_only,
        ),
        gauge("baton_quota_unsettled", "Quota settlements that wait for Redis", lambda: quota.unsettled),
        counter(
            "baton_quota_settlements_dropped",
            "Quota settlements dropped because they were too old or too many",
            lambda: quota.settlements_dropped,
        ),
        gauge("baton_redis_up", "1 while the membership can be read", lambda: services.members.redis_ok),
        counter(
            "baton_redis_errors",
            "Calls that Redis did not answer in time",
            lambda: {
                "membership": services.members.errors,
                "place": services.placement.errors["place"],
                "settle": services.placement.errors["settle"],
                "quota": services.quota.errors,
            },
            "call",
        ),
    ]
