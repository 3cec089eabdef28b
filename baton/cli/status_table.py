"""`baton status`: what a router's /v1/cluster says, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.formatting import (
    MISSING,
    cell,
    count,
    duration,
    gauge,
    share,
    shown,
    size,
    state_text,
    table,
    text,
)
from baton.router_http import RouterHttp
from cluster.protocol.times import RAY_HEAD_SILENT_SECONDS
from cluster.security.tls import ClientTls

_WIDE_COLUMNS = 110
_LONGEST_LINE = 2000
_REDIS = {"True": ("Redis ok", "green"), "False": ("Redis gone", "red")}


def show(
    url: str,
    *,
    as_json: bool,
    console: Console | None = None,
    api_key: str = "",
    tls: ClientTls | None = None,
) -> None:
    """Prints the cluster behind `url`. Raises UnavailableError when no router answers there."""
    console = console or Console()
    with RouterHttp(url, api_key, tls) as router:
        raw = router.get("/v1/cluster")
        if as_json:
            console.file.write(raw.decode() + "\n")
            return
        view = router.parsed(raw)
    page = render(view, wide=console.width >= _WIDE_COLUMNS)
    if not console.is_terminal:  # but a pipe or a file, whose reader looks for whole names
        longest = console.options.update(max_width=_LONGEST_LINE)
        console.width = max(console.width, console.measure(page, options=longest).maximum)
    console.print(page)


def render(view: Mapping[str, Any], *, wide: bool = True) -> RenderableType:
    """Render `view` as tables. Missing fields show as a dash: routers of other versions may have fewer, or more."""
    workers = sorted(view.get("workers") or (), key=lambda item: (text(item, "role"), text(item, "id")))
    parts: list[RenderableType] = [_headline(view, wide), *_ray(workers), Text()]
    parts.append(_workers(workers, wide) if workers else Text("no workers", style="yellow"))
    if reason := (view.get("placement") or {}).get("no_handoff"):
        parts += [Text(), Text(f"no hand-offs: {reason}", style="yellow")]
    return Group(*parts)


def _headline(view: Mapping[str, Any], wide: bool) -> Text:
    router, redis = view.get("router") or {}, view.get("redis") or {}
    placement = view.get("placement") or {}
    line = Text()
    line.append(text(router, "id"), style="bold")
    line.append(f"  up {shown(router, 'uptime_seconds', duration)}")
    line.append(f"  {shown(router, 'requests_in_flight', count)} in flight")
    line.append(f"  {shown(placement, 'requests', count)} requests")
    if wide:
        line.append(f"  {shown(placement, 'calls', count)} placements")
    line.append("  ")
    line.append(*_REDIS.get(str(redis.get("ok")), (f"Redis {MISSING}", "dim")))
    return line


def _ray(workers: list[Mapping[str, Any]]) -> list[Text]:
    """A line for each of Ray's heads that has not responded to a live worker."""
    silent: dict[str, float] = {}
    for status in (worker.get("status") or {} for worker in workers if text(worker, "lease") != "dead"):
        head, seconds = text(status, "ray_head"), status.get("ray_head_silent_seconds")
        if head != MISSING and isinstance(seconds, int | float) and seconds >= RAY_HEAD_SILENT_SECONDS:
            silent[head] = max(silent.get(head, 0.0), seconds)
    return [
        Text(
            f"Ray's head at {head} has not responded for {duration(seconds)}: workers serve; none is started or replaced",
            style="red",
        )
        for head, seconds in sorted(silent.items())
    ]


def _workers(workers: list[Mapping[str, Any]], wide: bool) -> Table:
    numbers = ("run/wait", "KV use", "hits", "hand-offs", "moved", *(("steps",) if wide else ()))
    made = table(("worker", "role", "state"), numbers)
    if wide:
        made.add_column("address", no_wrap=True)
    for worker in workers:
        made.add_row(*_row(worker, wide))
    return made


def _row(worker: Mapping[str, Any], wide: bool) -> list[RenderableType]:
    status = worker.get("status") or {}
    more = (shown(status, "steps", count), cell(worker, "address")) if wide else ()
    return [
        cell(worker, "id"),
        cell(worker, "role"),
        _state(text(worker, "state"), text(worker, "lease")),
        f"{shown(status, 'running', count)}/{shown(status, 'waiting', count)}",
        shown(status, "kv_usage_ratio", gauge if wide else share),
        shown(status, "prefix_hit_ratio", share),
        shown(status, "handoffs", count),
        shown(status, "kv_bytes", size),
        *more,
    ]


def _state(state: str, lease: str) -> Text:
    """The lease matters more, once it is not live."""
    return state_text(state if lease in ("live", MISSING) else lease)
