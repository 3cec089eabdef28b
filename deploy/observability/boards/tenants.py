"""Load, waiting times and refusals by tenant."""

from __future__ import annotations

from deploy.observability.boards.parts import Board, Row, by, quantile, rate, total


def tenants() -> Board:
    return Board(
        "tenants",
        "Tenants",
        "Who asks for how much, what they get, who is refused. The first 64 tenants have lines of their own.",
        [_load(), _what_they_get()],
    )


def _load() -> Row:
    return Row(
        "Load",
        [
            by(
                "Requests",
                "reqps",
                rate("baton_tenant_requests_total", "tenant"),
                "{{tenant}}",
                stacked=True,
            ),
            by(
                "In flight",
                "short",
                total("baton_tenant_requests_in_flight", "tenant"),
                "{{tenant}}",
                stacked=True,
            ),
            by(
                "Prompt tokens",
                "short",
                rate("baton_tenant_prompt_tokens_total", "tenant"),
                "{{tenant}}",
                stacked=True,
            ),
            by(
                "Tokens sent",
                "short",
                rate("baton_tenant_generation_tokens_total", "tenant"),
                "{{tenant}}",
                stacked=True,
            ),
            by(
                "Prompt tokens found in caches",
                "percentunit",
                f"{rate('baton_tenant_prefix_cache_hits_total', 'tenant')} / "
                f"{rate('baton_tenant_prompt_tokens_total', 'tenant')}",
                "{{tenant}}",
            ),
        ],
    )


def _what_they_get() -> Row:
    return Row(
        "What they get",
        [
            by(
                "Time to first token, 95th percentile",
                "s",
                quantile(0.95, "baton_tenant_time_to_first_token_seconds", "tenant"),
                "{{tenant}}",
            ),
            by(
                "Refused",
                "reqps",
                rate("baton_tenant_requests_total", "tenant", 'result="refused"'),
                "{{tenant}}",
            ),
            by(
                "Failed",
                "reqps",
                rate("baton_tenant_requests_total", "tenant", 'result="failed"'),
                "{{tenant}}",
            ),
            by("Beyond a quota", "reqps", rate("baton_quota_refused_total", "limit"), "{{limit}}"),
            by("Quota not checked", "reqps", rate("baton_quota_unchecked_total"), "Redis was gone"),
        ],
    )
