"""Are clients served, and how fast?"""

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


def overview() -> Board:
    return Board(
        "overview",
        "Overview",
        "Is it up, how fast is it, what do clients see?",
        [_now(), _what_clients_see(), _autoscaling(), _trouble()],
    )


def _now() -> Row:
    return Row(
        "Now",
        [
            Panel(
                "Workers alive",
                "short",
                [Query(total("baton_workers", "role", 'lease="live"', "max"), "{{role}}")],
                kind="stat",
            ),
            Panel("Requests in flight", "short", [Query(total("baton_requests_in_flight"))], kind="stat"),
            Panel(
                "Tokens a second",
                "short",
                [Query(rate("baton_router_generation_tokens_total"))],
                kind="stat",
            ),
        ],
    )


def _what_clients_see() -> Row:
    stages = by(
        "Where the time goes",
        "s",
        mean("baton_stage_seconds", "stage"),
        "{{stage}}",
        stacked=True,
        description="Mean seconds of a request by stage; decode includes the first step.",
    )
    return Row(
        "What clients see",
        [
            by(
                "Requests",
                "reqps",
                rate("baton_requests_total", "outcome"),
                "{{outcome}}",
                stacked=True,
            ),
            quantiles("Time to first token", "baton_time_to_first_token_seconds"),
            quantiles("Between tokens", "baton_inter_token_latency_seconds"),
            quantiles("Whole requests", "baton_e2e_request_latency_seconds"),
            Panel(
                "Tokens",
                "short",
                [
                    Query(rate("baton_prompt_tokens_total"), "prompt"),
                    Query(rate("baton_router_generation_tokens_total"), "generated"),
                    Query(rate("baton_router_prefix_cache_hits_total"), "prompt, cached"),
                ],
            ),
            stages,
        ],
    )


def _trouble() -> Row:
    return Row(
        "Trouble",
        [
            by("Attempts made again", "ops", rate("baton_retries_total", "reason"), "{{reason}}"),
            by(
                "Workers by lease",
                "short",
                total("baton_workers", "role, lease", "", "max"),
                "{{role}} {{lease}}",
            ),
            by(
                "Event loops run late",
                "s",
                mean("baton_event_loop_lag_seconds", "instance"),
                "{{instance}}",
            ),
        ],
    )


def _autoscaling() -> Row:
    """One of several autoscalers leads; the others show nothing, or what they last decided."""

    def replicas(which: str, legend: str) -> Query:
        return Query(
            total(f"baton_autoscaling_{which}_replicas", "model, pool", "", "max"),
            f"{{{{model}}}} {{{{pool}}}} {legend}",
        )

    def gpus(which: str, legend: str) -> Query:
        return Query(total(f"baton_autoscaling_{which}", "", "", "max"), legend)

    return Row(
        "Autoscaling",
        [
            Panel(
                "Replicas",
                "short",
                [
                    replicas("desired", "asked for"),
                    replicas("needed", "needed"),
                    replicas("current", "ready"),
                ],
                "Needed: by the load, before limits and budget.",
            ),
            Panel("GPUs", "short", [gpus("gpus_asked", "asked for"), gpus("gpu_budget", "budget")]),
            by(
                "Decisions by reason",
                "ops",
                rate("baton_autoscaling_decisions_total", "model, pool, reason"),
                "{{model}} {{pool}} {{reason}}",
                stacked=True,
            ),
        ],
    )
