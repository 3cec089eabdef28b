"""Each metric is declared once, and every name used anywhere is declared."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from baton.autoscaler.report import AutoscalingMetrics
from cluster.telemetry.metrics import process
from cluster.telemetry.metrics.catalogue import DECLARED
from cluster.telemetry.metrics.declaration import Declaration
from deploy.observability import metrics_doc
from tests.observability.scraped import differences

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "baton"
PACKAGES = (
    "baton",
    "router",
    "prefill_worker",
    "decode_worker",
    "worker",
    "kv_transfer",
    "engine",
    "cluster",
)
WORKERS = {"prefill", "decode"}
# Of a target or of a series that Prometheus makes, not of the metric
TARGET = {"namespace", "pod", "instance", "job", "container", "service"}
PARTS_OF_HISTOGRAMS = ("_bucket", "_sum", "_count")


def declared(name: str) -> Declaration | None:
    """The declaration of a sample."""
    for suffix in PARTS_OF_HISTOGRAMS:
        found = DECLARED.get(name.removesuffix(suffix))
        if name.endswith(suffix) and found is not None and found.kind == "histogram":
            return found
    return DECLARED.get(name)


def expressions() -> Iterator[tuple[str, str]]:
    for file in sorted((CHART / "files" / "dashboards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield f"{file.name}: {panel['title']}", target["expr"]
    for file in sorted((CHART / "files" / "alerts").glob("*.yaml")):
        for group in yaml.safe_load(file.read_text())["groups"]:
            for rule in group["rules"]:
                yield rule["alert"], rule["expr"]


def documents() -> Iterator[Path]:
    yield from (ROOT / "README.md", CHART / "README.md", CHART / "values.yaml")
    yield from sorted((CHART / "templates").rglob("*.*"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def test_the_names_follow_prometheus() -> None:
    units = {"seconds", "bytes", "ratio"}
    for name, one in DECLARED.items():
        assert re.fullmatch(r"baton(_[a-z0-9]+)+", name)
        assert name.endswith("_total") == (one.kind == "counter"), name
        base = name.removesuffix("_total")
        if one.unit in units:
            assert base.endswith(f"_{one.unit}"), f"{name} is in {one.unit}"
        for unit in units:
            assert not base.endswith(f"_{unit}") or unit in one.unit.split(" "), f"{name} is in {one.unit}"
        assert one.help and "\n" not in one.help and "|" not in one.help
        assert not set(one.labels) & {"worker", "le"}, f"{name} would hide a label that all have"
        if WORKERS & set(one.shown_by):
            assert not set(one.labels) & {"role", "model"}, f"{name} would hide a label of its worker"


def test_a_name_never_means_two_things_at_router_and_worker() -> None:
    """A metric of both roles has one meaning; one that differs has its owner in its name."""
    everywhere = {one.name for one in vars(process).values() if isinstance(one, Declaration)}
    for name, one in DECLARED.items():
        if "router" in one.shown_by and WORKERS & set(one.shown_by):
            assert name in everywhere
        twin = name.replace("baton_router_", "baton_worker_")
        if twin != name:
            assert twin in DECLARED and name.replace("baton_router_", "baton_") not in DECLARED


def test_code_takes_names_from_declarations() -> None:
    """A name in a string of code is a second declaration."""
    found = []
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        if file.parent.name == "metrics" and file.parent.parent.name == "telemetry":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value
                if declared(name) or declared(f"{name}_total"):
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}: {name}")
    assert found == []


def test_dashboards_and_alerts_name_declared_metrics_and_labels() -> None:
    selector = re.compile(r"(?<![\w\"])(baton_[a-z0-9_]+)(?:\{([^}]*)\})?")
    count = 0
    for where, expr in expressions():
        for name, labels in selector.findall(expr):
            one = declared(name)
            assert one is not None, f"{where}: {name} is not declared"
            of_worker = {"worker", "role", "model"} if WORKERS & set(one.shown_by) else set()
            known = {*one.labels, *of_worker, *TARGET, "le"}
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels)) <= known, f"{where}: {name}{{{labels}}}"
            count += 1
    assert count > 100


def test_documents_name_declared_metrics() -> None:
    count = 0
    for file in documents():
        for name in re.findall(r"(?<![\w/.-])baton_[a-z0-9_]+", file.read_text()):
            by_family = declared(f"{name}_total") is not None
            by_prefix = name.endswith("_") and any(one.startswith(name) for one in DECLARED)
            assert declared(name) or by_family or by_prefix, f"{file.relative_to(ROOT)}: {name}"
            count += 1
    assert count > 150


def test_the_list_of_metrics_is_what_is_declared() -> None:
    assert metrics_doc.TARGET.read_text() == metrics_doc.document(), "run make metrics-docs"


def test_the_autoscaler_shows_what_is_declared_for_it() -> None:
    registry = CollectorRegistry()
    AutoscalingMetrics(registry)
    assert differences(generate_latest(registry).decode(), "autoscaler") == []


@pytest.mark.parametrize("name", ["baton_nothing_total", "baton_handoffs_total", "baton_ring_slots_bucket"])
def test_undeclared_names_are_not_found(name: str) -> None:
    assert declared(name) is None
