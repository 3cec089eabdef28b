"""Grafana's dashboards, as code: `python -m deploy.observability.dashboards` writes them into the chart.

A panel is a title, a unit and queries; everything else Grafana wants is the same for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.observability import boards

TARGET = Path(__file__).resolve().parents[1] / "helm" / "baton" / "files" / "dashboards"
WIDTH, HEIGHT, COLUMNS = 8, 8, 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class _Place:
    id: int
    x: int
    y: int


def build(board: boards.Board) -> dict[str, Any]:
    """The JSON Grafana imports."""
    return {
        "uid": f"baton-{board.name}",
        "title": f"Baton / {board.title}",
        "description": board.description,
        "tags": ["baton"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "links": [
            {
                "type": "dashboards",
                "title": "Baton",
                "tags": ["baton"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "panels": list(_panels(board.rows)),
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        _label("Namespace", "label_values(baton_build_info, namespace)"),
        _label("Model", "label_values(baton_workers, model)"),
    ]


def _label(label: str, query: str) -> dict[str, Any]:
    """A choice among the values of a metric's label; all of them by default."""
    name = label.lower()
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels(rows: Sequence[boards.Row]) -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for row in rows:
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            "panels": [],
        }
        number, y = number + 1, y + 1
        for index, panel in enumerate(row.panels):
            x = index * WIDTH % COLUMNS
            yield _panel(panel, _Place(number, x, y + index * WIDTH // COLUMNS * HEIGHT))
            number += 1
        y += -(-len(row.panels) * WIDTH // COLUMNS) * HEIGHT


def _panel(panel: boards.Panel, place: _Place) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _DATASOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
            "exemplar": panel.exemplars,
        }
        for index, query in enumerate(panel.queries)
    ]
    shown: dict[str, Any] = {
        "id": place.id,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": {"x": place.x, "y": place.y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }
    if panel.kind == "timeseries":
        shown["fieldConfig"]["defaults"]["custom"] = {
            "fillOpacity": 20 if panel.stacked else 5,
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        }
        shown["options"] = {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    return shown


def text(board: boards.Board) -> str:
    return json.dumps(build(board), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    TARGET.mkdir(parents=True, exist_ok=True)
    for board in boards.all_boards():
        (TARGET / f"{board.name}.json").write_text(text(board))


if __name__ == "__main__":
    main()
