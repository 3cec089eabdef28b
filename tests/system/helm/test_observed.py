"""Alerts and dashboards reach the cluster as they are in the files."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.system.helm.rendering import CHART, ROOT, Rendered, Renderer, ValueSet
from tests.system.helm.value_sets import VALUE_SETS

pytestmark = pytest.mark.system


def test_every_file_is_there_unchanged(renderer: Renderer) -> None:
    rendered = renderer.render(VALUE_SETS["everything observed"])
    rules = {one["metadata"]["name"]: one["spec"] for one in rendered.of("PrometheusRule")}
    alerts = sorted((CHART / "files" / "alerts").glob("*.yaml"))
    assert rules == {f"t-baton-{file.stem}": yaml.safe_load(file.read_text()) for file in alerts}
    dashboards = sorted((CHART / "files" / "dashboards").glob("*.json"))
    assert alerts and dashboards
    for file in dashboards:
        config = rendered.named("ConfigMap", f"t-baton-dashboard-{file.stem}")
        assert json.loads(config["data"][file.name]) == json.loads(file.read_text())
        assert config["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_alerts_link_to_the_runbooks_of_the_installation(renderer: Renderer) -> None:
    """Nowhere, before their address is configured: no address is made up."""
    base = "https://git.example/baton/docs/runbooks"
    rules = {"enabled": True, "runbookBase": f"{base}/"}
    rendered = renderer.render(ValueSet(values={"observability": {"rules": rules}}))
    for alert in _alerts(rendered):
        assert alert["annotations"]["runbook_url"] == f"{base}/{alert['alert']}.md"
    assert "home" not in yaml.safe_load((CHART / "Chart.yaml").read_text())
    for alert in _alerts(renderer.render(VALUE_SETS["everything observed"])):
        assert "runbook_url" not in alert["annotations"]
        assert (ROOT / alert["annotations"]["runbook"]).exists()


def _alerts(rendered: Rendered) -> list[dict[str, Any]]:
    groups = [group for one in rendered.of("PrometheusRule") for group in one["spec"]["groups"]]
    found = [rule for group in groups for rule in group["rules"]]
    assert found
    return found


def test_monitors_find_the_ports_that_serve_metrics(renderer: Renderer) -> None:
    rendered = renderer.render(VALUE_SETS["everything observed"])
    (service_monitor,), (pod_monitor,) = rendered.of("ServiceMonitor"), rendered.of("PodMonitor")
    services = [
        one
        for one in rendered.of("Service")
        if service_monitor["spec"]["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
    ]
    ports = [port["name"] for one in services for port in one["spec"]["ports"]]
    assert ports.count(service_monitor["spec"]["endpoints"][0]["port"]) == 1
    assert pod_monitor["spec"]["podMetricsEndpoints"][0]["port"] == "metrics"


def test_a_label_of_all_objects_that_monitors_set_too_is_theirs_and_there_once(renderer: Renderer) -> None:
    """Strict readers of YAML, such as those that render after Helm, refuse a key that is there twice."""
    labels = {"release": "prometheus", "mine": "yes"}
    kinds = ("monitors", "rules", "dashboards")
    values = {
        "commonLabels": {"release": "all", "team": "inference"},
        "observability": {kind: {"enabled": True, "labels": labels} for kind in kinds},
    }
    rendered = renderer.render(ValueSet(values=values))
    seen = set()
    for document in yaml.compose_all(rendered.text, Loader=yaml.CSafeLoader):
        _check_keys(document)
    for one in rendered.manifests:
        own = one["metadata"]["labels"]
        assert own["team"] == "inference"
        if "mine" in own:
            seen.add(one["kind"])
        assert own["release"] == ("prometheus" if "mine" in own else "all")
    assert seen == {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"}


def _check_keys(node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value]
        assert len(names) == len(set(names)), names
        for _, value in node.value:
            _check_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_keys(value)
