"""Metrics of a router's view of the cluster: workers, placement, Redis, its own limits."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from cluster.membership.topology import LEVELS
from cluster.telemetry.histogram import Histogram
from cluster.telemetry.metrics import process
from cluster.telemetry.metrics import router as declared
from cluster.telemetry.scrape import ScrapeCollector, ScrapedMetric

if TYPE_CHECKING:
    from router.dispatch.services import Services

_LEASES = ("live", "suspect", "dead")


def collectors(services: Services, loop_lag: Histogram) -> list[Collector]:
    calls, costs = declared.REDIS_CALLS.create_family(), declared.PLACEMENT_COST.create_family()
    calls.adopt(services.placement.script.seconds, "place")
    calls.adopt(services.quota.scripts.seconds, "quota")
    index = services.placement.index
    if index is not None:
        calls.adopt(index.seconds, "match")
    for term, histogram in services.placement.script.cost_terms.items():
        costs.adopt(histogram, term)
    return [
        calls,
        costs,
        services.inter_token_seconds,
        process.EVENT_LOOP_LAG.show(loop_lag),
        ScrapeCollector(_read_at_a_scrape(services)),
    ]


def _read_at_a_scrape(services: Services) -> list[ScrapedMetric]:
    members, placement, quota = services.members, services.placement, services.quota
    limit, index = services.config.max_concurrent_requests, placement.index
    return [
        declared.WORKERS.read(lambda: _workers(services)),
        declared.WORKERS_DRAINING.read(lambda: _draining(services)),
        declared.WORKERS_SUSPECT.read(services.links.silent),
        declared.LINK_UNREAD.read(services.links.unread),
        declared.MEMBERSHIP_AGE.read(lambda: time.monotonic() - members.refreshed),
        declared.REQUESTS_LIMIT.read(lambda: limit),
        declared.PROCESSES.read(lambda: 1),
        declared.PROCESS_RESTARTS.read(lambda: 0),  # of a router of several, its parent counts
        declared.TOKENIZED_CACHE_HITS.read(partial(_cached, services, "hit_characters")),
        declared.TOKENIZED_CACHE_MISSES.read(partial(_cached, services, "missed_characters")),
        declared.TOKENIZED_CACHE_BYTES.read(partial(_cached, services, "bytes")),
        declared.PLACEMENTS.read(lambda: placement.decided),
        declared.PLACEMENTS_REFUSED.read(lambda: placement.refused),
        declared.PLACEMENT_CHARGED.read(placement.charges.total),
        declared.LEARNED_PREFILL.read(
            lambda: {model: placement.calibrations.of(model).a for model in services.config.model_names}
        ),
        declared.LEARNED_BANDWIDTH.read(lambda: _bandwidths(services)),
        declared.REDIS_UP.read(lambda: members.redis_ok),
        declared.REDIS_ERRORS.read(
            lambda: {
                "membership": members.errors,
                "place": placement.script.errors,
                "settle": placement.settlement.errors,
                "quota": quota.scripts.errors,
                **(index.errors if index is not None else {}),
            }
        ),
        declared.INDEX_UP.read(lambda: placement.script.redis_up if index is None else index.up),
        declared.INDEX_MEMORY_USED.read(lambda: placement.index_watch.memory.used_bytes),
        declared.INDEX_MEMORY_MAX.read(lambda: placement.index_watch.memory.max_bytes),
        declared.INDEX_EVICTS_INDEX_ONLY.read(lambda: placement.index_watch.memory.evicts_index_only),
        declared.REDIS_MEMORY_USED.read(lambda: placement.watch.memory.used_bytes),
        declared.REDIS_MEMORY_MAX.read(lambda: placement.watch.memory.max_bytes),
        declared.REDIS_EVICTS_INDEX_ONLY.read(lambda: placement.watch.memory.evicts_index_only),
        declared.QUOTA_UNSETTLED.read(lambda: quota.unsettled),
        declared.QUOTA_SETTLEMENTS_DROPPED.read(lambda: quota.settlements_dropped),
    ]


def _cached(services: Services, figure: str) -> dict[str, int]:
    """A figure of the piece caches by model; 0 for a tokenizer with which nothing is cached."""
    texts = {services.config.served_name: services.text, **services.further_texts}
    return {name: getattr(text.piece_cache, figure, 0) for name, text in texts.items()}


def _bandwidths(services: Services) -> dict[tuple[str, ...], float]:
    of, models = services.placement.calibrations.of, services.config.model_names
    rates = {model: zip(LEVELS, of(model).rates(), strict=True) for model in models}
    return {(model, level): rate for model, found in rates.items() for level, rate in found}


def _workers(services: Services) -> Counter[tuple[str, ...]]:
    """Workers by model, role and lease, with zeros, because an alert on missing workers needs a series. Workers of a name
    that is not served here count as of an unknown model: what they registered is not a label."""
    models, roles = services.config.model_names, ("prefill", "decode")
    count: Counter[tuple[str, ...]] = Counter(
        {(model, role, lease): 0 for model in models for role in roles for lease in _LEASES}
    )
    model_of = services.placement.eligibility.model_of
    for worker in services.members.all:
        model = model_of(worker) or models[0]
        count[model if model in models else declared.UNKNOWN_MODEL, worker.role, worker.lease] += 1
    return count


def _draining(services: Services) -> Counter[str]:
    count: Counter[str] = Counter({"prefill": 0, "decode": 0})
    count.update(worker.role for worker in services.members.all if worker.state == "draining")
    return count
