"""The chart's alerts and dashboards as the tests read them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.system.observability.debian_prometheus import ROOT

FILES = ROOT / "deploy" / "helm" / "baton" / "files"
RUNBOOKS = ROOT / "docs" / "runbooks"
WINDOW = "15s"
# A name that is not a label, a function, or a part of another name.
_METRIC = re.compile(r"(?<![\w\"{,])\b((?:baton|process)_[a-z0-9_]+)\b")


def alert_files() -> list[Path]:
    return sorted((FILES / "alerts").glob("*.yaml"))


def alerts() -> list[dict[str, Any]]:
    return [
        rule
        for file in alert_files()
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
    ]


def hurried(directory: Path) -> list[Path]:
    """The same alerts, with windows of seconds in place of minutes: what they look at stays as it is."""
    written = []
    for file in alert_files():
        rules = yaml.safe_load(file.read_text())
        for rule in (rule for group in rules["groups"] for rule in group["rules"]):
            rule["expr"] = re.sub(r"\[\d+[mh]\]", f"[{WINDOW}]", rule["expr"])
            if "for" in rule:
                # What may go on for minutes in a cluster may go on for seconds on a busy machine.
                rule["for"] = "20s" if re.fullmatch(r"\d{2,}m", rule["for"]) else "1s"
        path = directory / f"hurried-{file.name}"
        path.write_text(yaml.safe_dump(rules))
        written.append(path)
    return written


@dataclass(frozen=True)
class Shown:
    """A query of a dashboard, filled in as Grafana would."""

    where: str
    expr: str


def dashboard_queries() -> Iterator[Shown]:
    for file in sorted((FILES / "dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expr = target["expr"].replace("$__rate_interval", WINDOW).replace("$namespace", ".*")
                expr = expr.replace("$model", ".*")
                yield Shown(f"{file.stem}: {panel['title']}: {target['expr']}", expr)


def metrics_in(expr: str) -> set[str]:
    return set(_METRIC.findall(expr))
