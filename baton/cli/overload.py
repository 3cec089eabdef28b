"""Flags that say who waits, who is refused, and how much a tenant may use: the same for `baton up` and `baton router`.

Each is the router's setting of its name; not given, the configuration's own default holds.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

PANEL = "Overload: who waits, who is refused"


def _option(help_text: str, default: str) -> Any:
    return typer.Option(help=f"{help_text} [dim]default: {default}[/dim]", rich_help_panel=PANEL)


TtftHigh = Annotated[
    float | None,
    _option(
        "A request of priority high whose first token would come later is refused at once, with the time to come "
        "back; 0 = none is refused for being late.",
        "10",
    ),
]
TtftNormal = Annotated[float | None, _option("The same for normal requests.", "30")]
TtftBatch = Annotated[
    float | None, _option("The same for batch requests, which wait behind all others.", "120")
]
AdmissionSeconds = Annotated[
    float | None, _option("How long a request waits for a worker with room, or for workers at all.", "30")
]
MaxRequests = Annotated[int | None, _option("Requests in flight in one router.", "1024")]
MaxRequestsPerTenant = Annotated[
    int | None,
    _option(
        "Of one tenant in one router; a key's max_concurrent_requests goes before it. 0 = no limit.", "0"
    ),
]
RequestsPerMinute = Annotated[
    int | None,
    _option(
        "Of one tenant over all routers, counted in Redis; requests_per_minute in the keys file goes before it. "
        "0 = no limit.",
        "0",
    ),
]
TokensPerMinute = Annotated[
    int | None,
    _option("The same for tokens of prompts and answers: tokens_per_minute in the keys file.", "0"),
]
BatchAging = Annotated[
    float | None,
    _option("A request that has queued for so long in its class counts as of the next higher one.", "30"),
]

ROUTER_SETTINGS = (
    "ttft_target_seconds_high",
    "ttft_target_seconds_normal",
    "ttft_target_seconds_batch",
    "admission_seconds",
    "max_concurrent_requests",
    "max_concurrent_requests_per_tenant",
    "requests_per_minute_per_tenant",
    "tokens_per_minute_per_tenant",
)


def take_limits(flags: dict[str, Any]) -> dict[str, float]:
    """Removes these flags from `flags`; returns those that were given."""
    taken = {name: flags.pop(name) for name in ROUTER_SETTINGS}
    return {name: value for name, value in taken.items() if value is not None}
