"""The answer of `/v1/cluster/live`, for `baton top` and `/ui` (docs/api.md). It holds no secrets and no prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from cluster.membership.types import WorkerInfo
from router.observe.live.exchange import RouterCounts
from router.observe.live.history import (
    RECENT_SECONDS,
    TICK_SECONDS,
    WINDOW_SECONDS,
    ChartPoint,
    FlowRates,
    History,
    Percentiles,
    RouterRates,
)
from router.observe.live.worker_rates import RatesOfWorkers, WorkerRates

Figures: TypeAlias = ChartPoint | Percentiles | RouterRates | FlowRates | WorkerRates

GONE_SECONDS = 3 * TICK_SECONDS  # three reports are missing
_STATUS = (
    "running",
    "waiting",
    "waiting_for_kv",
    "waiting_prefill_tokens",
    "kv_usage_ratio",
    "blocks_total",
    "handoffs_live",
)


def live_view(
    router_id: str,
    redis_ok: bool,
    routers: Mapping[str, RouterCounts],
    workers: Iterable[WorkerInfo],
    rates: RatesOfWorkers,
    history: History,
    no_handoff: str = "",
) -> dict[str, Any]:
    """`no_handoff`: why this router had no KV handed over; shown unless another one had."""
    moved = any(counts.report.counts.flows for counts in routers.values())
    return {
        "router": router_id,
        "redis": {"ok": redis_ok},
        "window_seconds": {"rates": WINDOW_SECONDS, "percentiles": RECENT_SECONDS},
        "now": {
            "requests_in_flight": sum(
                counts.report.in_flight for counts in routers.values() if counts.age_seconds < GONE_SECONDS
            ),
            **_figures(history.recent()),
            "no_handoff": "" if moved else no_handoff,
        },
        "routers": [_router(name, counts, history) for name, counts in sorted(routers.items())],
        "workers": [_worker(worker, rates) for worker in workers],
        "flows": [
            {"from": sender, "to": receiver, **_figures(flow)}
            for (sender, receiver), flow in sorted(history.flows().items())
        ],
        "history": {"interval_seconds": TICK_SECONDS, **_columns(history.points)},
    }


def _router(name: str, counts: RouterCounts, history: History) -> dict[str, Any]:
    return {
        "id": name,
        "state": counts.report.state if counts.age_seconds < GONE_SECONDS else "gone",
        "uptime_seconds": round(counts.report.uptime_seconds, 1),
        "requests_in_flight": counts.report.in_flight,
        **_figures(history.router_rates(name)),
    }


def _worker(worker: WorkerInfo, rates: RatesOfWorkers) -> dict[str, Any]:
    shown = {name: getattr(worker.status, name) for name in _STATUS}
    return {
        "id": worker.worker_id,
        "role": worker.role,
        # A lease that is not live matters more than the worker's own state.
        "state": worker.state if worker.lease == "live" else worker.lease,
        "place": worker.place,
        **{name: _short(value) if isinstance(value, float) else value for name, value in shown.items()},
        **_figures(rates.of(worker)),
    }


def _figures(of: Figures) -> dict[str, Any]:
    return {
        name: _figures(value) if isinstance(value, Percentiles) else _short(value)
        for name, value in of._asdict().items()
    }


def _columns(points: Iterable[ChartPoint]) -> dict[str, list[float | None]]:
    """A list for each line of the charts, oldest first."""
    columns: dict[str, list[float | None]] = {name: [] for name in _flat(ChartPoint())}
    for point in points:
        for name, value in _flat(point).items():
            columns[name].append(_short(value))
    return columns


def _flat(point: ChartPoint) -> dict[str, float | None]:
    flat = {f"ttft_{part}": value for part, value in point.ttft._asdict().items()}
    flat |= {f"itl_{part}": value for part, value in point.itl._asdict().items()}
    return flat | {name: value for name, value in point._asdict().items() if name not in ("ttft", "itl")}


def _short(value: float | None) -> float | None:
    """The value with four digits."""
    return None if value is None else float(f"{value:.4g}")
