"""`baton status`: what a router's /v1/cluster says, as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx
import orjson
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.errors import InternalError, UnauthenticatedError, UnavailableError
from cluster.tls import ClientTls

TIMEOUT_SECONDS = 5.0
MISSING = "–"
_BAR_CELLS = 5
_WIDE_COLUMNS = 110
_REDIS = {"True": ("Redis ok", "green"), "False": ("Redis gone", "red")}
_STATE_STYLES = {"ready": "green", "draining": "yellow", "suspect": "yellow", "dead": "red"}


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
    raw = fetch(url, api_key, tls)
    if as_json:
        console.file.write(raw.decode() + "\n")
        return
    try:
        view = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InternalError(f"{url} does not speak for a Baton cluster: {error}") from error
    console.print(render(view, wide=console.width >= _WIDE_COLUMNS))


def fetch(url: str, api_key: str = "", tls: ClientTls | None = None) -> bytes:
    """The body of /v1/cluster, as it came."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    verify = tls.context() if tls is not None else True
    address = url if "//" in url else f"{'http' if tls is None else 'https'}://{url}"
    try:
        # trust_env off: a proxy of the shell's would be asked for a router on this machine
        with httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False, headers=headers, verify=verify) as client:
            answer = client.get(f"{address.rstrip('/')}/v1/cluster")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnavailableError(f"no router answers at {address} ({error})", field="url") from error
    if answer.status_code in (401, 403):
        raise UnauthenticatedError(f"{address} wants an admin's API key (--api-key)", field="api_key")
    if answer.status_code != 200:
        raise UnavailableError(f"{address} answers with status {answer.status_code}", field="url")
    return answer.content


def render(view: Mapping[str, Any], *, wide: bool = True) -> RenderableType:
    """What is missing from `view` shows as a dash: routers of other versions may say less, or more."""
    workers = sorted(view.get("workers") or (), key=lambda item: (_text(item, "role"), _text(item, "id")))
    parts: list[RenderableType] = [_headline(view, wide), Text()]
    parts.append(_workers(workers, wide) if workers else Text("no workers", style="yellow"))
    return Group(*parts)


def _headline(view: Mapping[str, Any], wide: bool) -> Text:
    router, redis = view.get("router") or {}, view.get("redis") or {}
    placement = view.get("placement") or {}
    line = Text()
    line.append(_text(router, "id"), style="bold")
    line.append(f"  up {_shown(router, 'uptime_seconds', _duration)}")
    line.append(f"  {_shown(router, 'requests_in_flight', _count)} in flight")
    line.append(f"  {_shown(placement, 'requests', _count)} requests")
    if wide:
        line.append(f"  {_shown(placement, 'calls', _count)} placements")
    line.append("  ")
    line.append(*_REDIS.get(str(redis.get("ok")), (f"Redis {MISSING}", "dim")))
    return line


def _workers(workers: list[Mapping[str, Any]], wide: bool) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("worker", "role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("run/wait", "KV use", "hits", "hand-offs", "moved"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("steps", justify="right", no_wrap=True)
        table.add_column("address", no_wrap=True)
    for worker in workers:
        table.add_row(*_row(worker, wide))
    return table


def _row(worker: Mapping[str, Any], wide: bool) -> list[RenderableType]:
    status = worker.get("status") or {}
    more = (_shown(status, "steps", _count), _text(worker, "address")) if wide else ()
    return [
        _text(worker, "id"),
        _text(worker, "role"),
        _state(_text(worker, "state"), _text(worker, "lease")),
        f"{_shown(status, 'running', _count)}/{_shown(status, 'waiting', _count)}",
        _shown(status, "kv_usage_ratio", _gauge if wide else _share),
        _shown(status, "prefix_hit_ratio", _share),
        _shown(status, "handoffs", _count),
        _shown(status, "kv_bytes", _size),
        *more,
    ]


def _text(of: Mapping[str, Any], name: str) -> str:
    value = of.get(name)
    return MISSING if value in (None, "") else str(value)


def _state(state: str, lease: str) -> Text:
    """The lease matters more, once it is not live."""
    word = state if lease in ("live", MISSING) else lease
    return Text(word, style=_STATE_STYLES.get(word, ""))


def _shown(of: Mapping[str, Any], name: str, write: Callable[[float], str]) -> str:
    value = of.get(name)
    return write(value) if isinstance(value, int | float) and not isinstance(value, bool) else MISSING


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{value:.0%}"


def _gauge(value: float) -> str:
    filled = round(max(0.0, min(1.0, value)) * _BAR_CELLS)
    return f"{'█' * filled}{'░' * (_BAR_CELLS - filled)} {value:4.0%}"


def _size(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
