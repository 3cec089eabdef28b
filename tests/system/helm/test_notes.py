"""The notes after an install: the next three commands exist and name installed objects."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.system.helm.rendering import CHART, Rendered, Renderer
from tests.system.helm.value_sets import VALUE_SETS

pytestmark = pytest.mark.system
# `helm template` leaves NOTES.txt out: here it is rendered into an object of its own.
TEMPLATE = """apiVersion: v1
kind: ConfigMap
metadata: {name: told}
data:
  notes: |
    {{- tpl (.Files.Get "NOTES.txt") . | nindent 4 }}
"""


def _told(
    renderer: Renderer, folder: Path, values: dict[str, Any], release: str = "t"
) -> tuple[str, Rendered]:
    chart = folder / "baton"
    if not chart.exists():
        shutil.copytree(CHART, chart)
        shutil.move(chart / "templates" / "NOTES.txt", chart / "NOTES.txt")
        (chart / "templates" / "told.yaml").write_text(TEMPLATE)
    done = renderer.run(
        "template", release, str(chart), "--namespace", "serving", "-f", "-", stdin=json.dumps(values)
    )
    rendered = Rendered(done.returncode, done.stdout, done.stderr)
    return str(rendered.named("ConfigMap", "told")["data"]["notes"]), rendered


def _indented(notes: str) -> list[str]:
    return [line.strip() for line in notes.splitlines() if line.startswith("  ")]


@pytest.mark.parametrize(
    ("release", "values"),
    [
        ("t", {}),
        ("baton-one", {"router": {"httpPort": 8080, "grpcPort": 5000}}),
        ("t", {"fullnameOverride": "llm"}),
    ],
)
def test_the_next_three_commands_name_the_installed_objects(
    release: str, values: dict[str, Any], renderer: Renderer, tmp_path: Path
) -> None:
    notes, rendered = _told(renderer, tmp_path, values, release)
    rollout, tests, forward = _indented(notes)
    (deployment,) = re.findall(
        r"^kubectl -n serving rollout status deployment/(\S+) --timeout=600s$", rollout
    )
    rendered.named("Deployment", deployment)
    assert tests == f"helm test {release} -n serving"
    ((service, *ports),) = re.findall(r"^kubectl -n serving port-forward service/(\S+) (\d+) (\d+)$", forward)
    opened = rendered.named("Service", service)["spec"]["ports"]
    assert [int(port) for port in ports] == [port["port"] for port in opened]
    assert f"baton chat --target 127.0.0.1:{ports[1]}" in notes
    assert f"http://127.0.0.1:{ports[0]}/v1" in notes


def test_missing_parts_of_an_install_are_reported(renderer: Renderer, tmp_path: Path) -> None:
    bare, _ = _told(renderer, tmp_path, {})
    assert "Set decode.replicas to 2" in bare and "No API keys" in bare
    full, _ = _told(renderer, tmp_path, {**VALUE_SETS["own secrets"].values, "decode": {"replicas": 2}})
    assert "Set decode.replicas" not in full and "No API keys" not in full


def test_settings_that_leave_an_install_open_are_warned_of(renderer: Renderer, tmp_path: Path) -> None:
    def warned(values: dict[str, Any]) -> list[str]:
        notes, _ = _told(renderer, tmp_path, values)
        return re.findall(r"(?m)^WARNING: (No API keys|TLS is off|networkPolicy is off)", notes)

    keys = dict(VALUE_SETS["own secrets"].values)
    tls = dict(VALUE_SETS["own certificates"].values)
    assert warned({}) == ["No API keys", "TLS is off"]
    assert warned(keys) == ["TLS is off"]
    assert "API keys and KV go" in _told(renderer, tmp_path, keys)[0]
    assert warned(tls) == ["No API keys"]
    tests = {**keys["tests"], **tls["tests"]}
    assert warned({**keys, **tls, "tests": tests}) == []
    assert warned({**keys, **tls, "tests": tests, "networkPolicy": {"enabled": False}}) == [
        "networkPolicy is off"
    ]


def test_nodes_of_an_external_ray_are_listed_with_their_mounts(renderer: Renderer, tmp_path: Path) -> None:
    values = {
        **VALUE_SETS["own certificates"].values,
        "ray": {"mode": "external", "external": {"dashboardUrl": "http://ray:8265"}},
        "redis": {"enabled": False},
        "externalRedis": {"urlSecret": {"name": "url"}, "tlsSecret": "redis-tls"},
    }
    notes, _ = _told(renderer, tmp_path, values)
    told = notes[notes.index("Ray's nodes") :]
    assert "worker-tls at /etc/baton/tls" in told
    assert "redis-tls at /etc/baton/redis-tls" in told
    assert "/opt/baton/demo-model" in told
    assert "Ray's nodes" not in _told(renderer, tmp_path, {})[0]


def test_clients_are_told_of_certificates_where_there_are_some(renderer: Renderer, tmp_path: Path) -> None:
    with_tls, _ = _told(renderer, tmp_path, dict(VALUE_SETS["own certificates"].values))
    assert "baton chat --target localhost:50051 --tls-ca ca.crt" in with_tls
    assert "https://localhost:8000/v1" in with_tls and "http://" not in with_tls
    without, _ = _told(renderer, tmp_path, {})
    assert "baton chat --target 127.0.0.1:50051, or any OpenAI client at http://127.0.0.1:8000/v1" in without
    assert "tls-ca" not in without and "https://" not in without
