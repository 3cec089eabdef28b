"""Alerts and dashboards reach the cluster as the files say them."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.system.helm.rendering import CHART, Renderer
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
