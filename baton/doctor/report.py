"""Output of `baton doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import yaml
from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from baton.doctor.checks import Check
from baton.doctor.facts import ZONE_LABEL, Facts
from baton.doctor.pods import Values


class _Plain(yaml.SafeDumper):
    """Dumps values without YAML aliases, so that either pool can be edited alone."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_STYLES = {"ok": "green", "info": "cyan", "warning": "yellow", "missing": "red"}


def render(facts: Facts, checks: Sequence[Check], values: Values) -> RenderableType:
    return Group(
        checks_table(checks),
        Text(),
        *_nodes(facts),
        Text("values for the chart:", style="bold"),
        _yaml(values),
    )


def as_json(facts: Facts, checks: Sequence[Check], values: Values) -> dict[str, Any]:
    return {
        **of_checks(checks),
        "gpus": [
            {"product": product, "resource": resource, "allocatable": count}
            for (product, resource), count in facts.gpu_kinds().most_common()
        ],
        "values": values,
    }


def of_checks(checks: Sequence[Check]) -> dict[str, Any]:
    """The part of the JSON that needs no facts of a cluster."""
    return {
        "ok": not any(check.grade == "missing" for check in checks),
        "checks": [asdict(check) for check in checks],
    }


def as_yaml(values: Values) -> str:
    return str(yaml.dump(values, Dumper=_Plain, sort_keys=False, default_flow_style=False))


def checks_table(checks: Sequence[Check]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("", "what", "found", "advice"):
        table.add_column(name, no_wrap=name == "what", overflow="fold")
    for check in checks:
        table.add_row(Text(check.grade, style=_STYLES[check.grade]), check.name, check.found, check.advice)
    return table


def _nodes(facts: Facts) -> list[RenderableType]:
    if not facts.gpu_nodes:
        return []
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("GPU node", "GPUs", "type", "RDMA", "zone"):
        table.add_column(name, justify="right" if name == "GPUs" else "left")
    for node in sorted(facts.gpu_nodes, key=lambda node: node.name):
        rdma = ", ".join(f"{count} × {name}" for name, count in node.rdma.items()) or "–"
        kind = node.gpu_product or node.gpu_resource
        table.add_row(node.name, str(node.gpus), kind, rdma, node.labels.get(ZONE_LABEL, "–"))
    return [table, Text()]


def _yaml(values: Values) -> Syntax:
    return Syntax(as_yaml(values), "yaml", background_color="default", word_wrap=True)
