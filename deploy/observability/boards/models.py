"""Requests, latencies and limits of each model of a router."""

from __future__ import annotations

from deploy.observability.boards.parts import Board, Panel, Row, by, mean, quantile, rate, total


def models() -> Board:
    return Board(
        "models",
        "Models",
        "The models behind one router, side by side: load, latency, workers, refusals.",
        [
            Row(
                "Load",
                [
                    _stacked("Requests", "reqps", rate("baton_requests_total", "model")),
                    _stacked("In flight", "short", total("baton_model_requests_in_flight", "model")),
                    _stacked("Tokens sent", "short", rate("baton_router_generation_tokens_total", "model")),
                    _stacked("Prompt tokens", "short", rate("baton_prompt_tokens_total", "model")),
                ],
            ),
            Row(
                "What clients see",
                [
                    _slowest("Time to first token", "baton_time_to_first_token_seconds"),
                    _slowest("Between tokens", "baton_inter_token_latency_seconds"),
                    by(
                        "Queued for prefill, mean",
                        "s",
                        mean("baton_stage_seconds", "model", 'stage="prefill_queue"'),
                        "{{model}}",
                    ),
                    by(
                        "Refused for overload",
                        "reqps",
                        rate("baton_requests_total", "model", 'outcome=~"overloaded|OverloadedError"'),
                        "{{model}}",
                        description="unknown: before the body was read, so before its model was known",
                    ),
                ],
            ),
            Row(
                "Workers",
                [
                    by(
                        "Alive",
                        "short",
                        total("baton_workers", "model, role", 'lease="live"', "max"),
                        "{{model}} {{role}}",
                    ),
                ],
            ),
        ],
    )


def _stacked(title: str, unit: str, expr: str) -> Panel:
    return by(title, unit, expr, "{{model}}", stacked=True)


def _slowest(title: str, metric: str) -> Panel:
    return by(f"{title}, 95th percentile", "s", quantile(0.95, metric, "model"), "{{model}}")
