"""Parts of boards. `$__rate_interval`, `$namespace` and `$model` are Grafana's to fill in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.telemetry.metrics.catalogue import DECLARED

NS = 'namespace=~"$namespace"'
MODEL = 'model=~"$model"'
_OF_HISTOGRAMS = ("_bucket", "_sum", "_count")


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str  # Grafana's name of it
    queries: Sequence[Query]
    description: str = ""
    kind: Literal["timeseries", "stat"] = "timeseries"
    stacked: bool = False
    exemplars: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Board:
    name: str
    title: str
    description: str
    rows: Sequence[Row] = field(default_factory=tuple)


def _selector(metric: str, labels: str) -> str:
    """Labels that select the chosen namespace, and the model where the metric has that label."""
    chosen = [NS, MODEL] if _is_of_models(metric) else [NS]
    return f"{metric}{{{','.join([*chosen, *([labels] if labels else [])])}}}"


def _is_of_models(metric: str) -> bool:
    names = (metric, *(metric.removesuffix(end) for end in _OF_HISTOGRAMS))
    return any("model" in DECLARED[name].labels for name in names if name in DECLARED)


def rate(metric: str, by: str = "", labels: str = "") -> str:
    """A counter's increase a second, summed."""
    return f"sum{f' by ({by})' if by else ''} (rate({_selector(metric, labels)}[$__rate_interval]))"


def total(metric: str, by: str = "", labels: str = "", over: str = "sum") -> str:
    """A gauge, summed (or whatever `over` says)."""
    return f"{over}{f' by ({by})' if by else ''} ({_selector(metric, labels)})"


def quantile(share: float, metric: str, by: str = "", labels: str = "") -> str:
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', f'le, {by}' if by else 'le', labels)})"


def mean(metric: str, by: str = "", labels: str = "") -> str:
    return f"{rate(f'{metric}_sum', by, labels)} / {rate(f'{metric}_count', by, labels)}"


def quantiles(title: str, metric: str, description: str = "", labels: str = "") -> Panel:
    queries = [Query(quantile(share, metric, "", labels), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)]
    return Panel(title, "s", queries, description, exemplars=True)


def by(
    title: str,
    unit: str,
    expr: str,
    legend: str,
    *,
    stacked: bool = False,
    description: str = "",
) -> Panel:
    """One query, a line for each value of a label."""
    return Panel(title, unit, [Query(expr, legend)], description, stacked=stacked)
