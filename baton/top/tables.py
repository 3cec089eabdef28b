"""Workers by role, and routers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from baton.formatting import (
    MISSING,
    bar,
    cell,
    count,
    duration,
    rate,
    share,
    shown,
    size_rate,
    state_text,
    table,
    text,
)

Detail = Literal["wide", "narrow", "tight"]
_KV_CELLS: dict[Detail, int] = {"wide": 16, "narrow": 6, "tight": 0}
_MORE = ("hand-offs/s", "KV out/in")
_KV_FULL = 0.9
_KV_BUSY = 0.7
_ROLES = ("prefill", "decode")
Worker = Mapping[str, Any]


def workers_table(
    workers: Sequence[Worker], flows: Sequence[Mapping[str, Any]], detail: Detail, room: int | None
) -> Table:
    """A table of at most `room` rows, preferring workers in trouble and the fullest ones, in the order of their names."""
    gap = 1 if detail == "tight" else 2
    made = table(("role", "worker", "state"), ("run", "wait"), head="dim", gap=gap)
    made.add_column("KV", no_wrap=True)
    for name in ("hits", "tokens/s", *(_MORE if detail == "wide" else ())):
        made.add_column(name, justify="right", no_wrap=True)
    kept = _kept(workers, room)
    previous = ""
    for worker in sorted(kept, key=_order):
        role = text(worker, "role")
        made.add_row(*_row(worker, role if role != previous else "", flows, detail))
        previous = role
    if len(kept) < len(workers):
        made.add_row("", Text(f"and {len(workers) - len(kept)} more", style="dim"))
    return made


def _order(worker: Worker) -> tuple[int, str]:
    role = text(worker, "role")
    return (_ROLES.index(role) if role in _ROLES else len(_ROLES), text(worker, "id"))


def _kept(workers: Sequence[Worker], room: int | None) -> Sequence[Worker]:
    if room is None or len(workers) <= room:
        return workers

    def order(worker: Worker) -> tuple[bool, float]:
        return (text(worker, "state") == "ready", -float(worker.get("kv_usage_ratio") or 0.0))

    return sorted(workers, key=order)[: max(1, room - 1)]


def _row(worker: Worker, role: str, flows: Sequence[Mapping[str, Any]], detail: Detail) -> list[str | Text]:
    is_prefill = worker.get("role") == "prefill"
    tokens = "prompt_tokens_per_second" if is_prefill else "output_tokens_per_second"
    more = (
        [shown(worker, "handoffs_per_second", rate), size_rate(_moved(worker, flows))]
        if detail == "wide"
        else []
    )
    return [
        Text(role, style="bold"),
        cell(worker, "id"),
        state_text(text(worker, "state")),
        shown(worker, "running", count),
        shown(worker, "waiting", count),
        _kv(worker, _KV_CELLS[detail]),
        shown(worker, "prefix_hit_ratio", share),
        shown(worker, tokens, rate),
        *more,
    ]


def _kv(worker: Worker, cells: int) -> Text:
    value = worker.get("kv_usage_ratio")
    if not isinstance(value, int | float):
        return Text(MISSING)
    style = "red" if value > _KV_FULL else "yellow" if value > _KV_BUSY else "green"
    drawn = bar(value, cells)
    filled = drawn.count("█")
    return Text.assemble(
        (drawn[:filled], style), (drawn[filled:], "dim"), f" {value:4.0%}" if cells else f"{value:.0%}"
    )


def _moved(worker: Worker, flows: Sequence[Mapping[str, Any]]) -> float:
    """KV bytes per second out of a prefill worker or into a decode worker."""
    end = "from" if worker.get("role") == "prefill" else "to"
    return float(
        sum(flow.get("bytes_per_second") or 0.0 for flow in flows if flow.get(end) == worker.get("id"))
    )


def routers_table(routers: Sequence[Mapping[str, Any]]) -> Table:
    made = table(("router", "state"), ("in flight", "req/s", "tok/s", "up"), head="dim")
    for router in routers:
        made.add_row(
            cell(router, "id"),
            state_text(text(router, "state")),
            shown(router, "requests_in_flight", count),
            shown(router, "requests_per_second", rate),
            shown(router, "output_tokens_per_second", rate),
            shown(router, "uptime_seconds", duration),
        )
    return made
