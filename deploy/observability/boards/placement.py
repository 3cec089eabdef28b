"""Placements: the workers chosen, and the terms of their cost."""

from __future__ import annotations

from deploy.observability.boards.parts import (
    Board,
    Panel,
    Query,
    Row,
    by,
    mean,
    quantiles,
    rate,
    total,
)


def placement() -> Board:
    return Board(
        "placement",
        "Placement",
        "Where requests go, what placing costs, what the prefix caches save.",
        [_decisions(), _prefix_cache(), _redis(), _what_the_cost_model_has_learned()],
    )


def _decisions() -> Row:
    return Row(
        "Decisions",
        [
            by(
                "Placements by prefilling role and by decider",
                "ops",
                rate("baton_placements_total", "prefill, by"),
                "{{prefill}}, by {{by}}",
                stacked=True,
            ),
            by(
                "Placements refused, by reason",
                "ops",
                rate("baton_placements_refused_total", "reason"),
                "{{reason}}",
            ),
            by(
                "Tokens placed and not done",
                "short",
                total("baton_placement_charged_tokens", "stage"),
                "{{stage}}",
            ),
        ],
    )


def _prefix_cache() -> Row:
    return Row(
        "Prefix cache",
        [
            Panel(
                "Share of prompt tokens found in caches",
                "percentunit",
                [
                    Query(
                        f"{rate('baton_router_prefix_cache_hits_total')} / "
                        f"{rate('baton_router_prefix_cache_queries_total')}"
                    )
                ],
            ),
            by(
                "Hits by worker",
                "short",
                rate("baton_worker_prefix_cache_hits_total", "worker"),
                "{{worker}}",
            ),
            by(
                "Chains not yet reported",
                "short",
                total("baton_index_reports_waiting", "worker"),
                "{{worker}}",
            ),
        ],
    )


def _redis() -> Row:
    reached = " or ".join(total(f"baton_{of}_redis_up", "instance", "", "min") for of in ("router", "worker"))
    return Row(
        "Redis",
        [
            quantiles("Placing", "baton_redis_call_seconds", labels='call="place"'),
            by(
                "Calls without an answer",
                "ops",
                rate("baton_router_redis_errors_total", "call"),
                "{{call}}",
            ),
            by("Reached", "short", reached, "{{instance}}"),
            Panel(
                "Memory",
                "bytes",
                [
                    Query("max(baton_redis_memory_used_bytes)", "used"),
                    Query("max(baton_redis_memory_max_bytes)", "maxmemory"),
                ],
            ),
        ],
    )


def _what_the_cost_model_has_learned() -> Row:
    return Row(
        "What the cost model has learned",
        [
            by(
                "Prefill, seconds a token",
                "s",
                total("baton_placement_learned_prefill_seconds_per_token", "instance, model", "", "max"),
                "{{instance}} {{model}}",
            ),
            by("Expected cost", "s", mean("baton_placement_cost_seconds", "term"), "{{term}}"),
            by(
                "Hand-off bandwidth",
                "Bps",
                total("baton_placement_learned_bandwidth_bytes_per_second", "model, level", "", "max"),
                "{{model}} {{level}}",
            ),
            by(
                "Age of the membership",
                "s",
                total("baton_membership_age_seconds", "instance", "", "max"),
                "{{instance}}",
            ),
        ],
    )
