"""The chart passes lint in both Helm majors, and its generated files are up to date."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.system.helm.rendering import CHART, ROOT, Renderer

pytestmark = pytest.mark.system


def test_lint_is_clean(helm: Path) -> None:
    """On the examples too: their keys exist, their types fit."""
    for file in [None, *sorted((CHART / "values").iterdir())]:
        values = ["-f", str(file)] if file is not None else []
        done = Renderer(helm).run("lint", "--strict", str(CHART), *values, *_needed(file))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "0 chart(s) failed" in done.stdout


def _needed(file: Path | None) -> list[str]:
    """Lint has no --api-versions: what needs an operator is set by values where the file allows."""
    if file is None:
        return []
    values = yaml.safe_load(file.read_text())
    if values.get("tls", {}).get("enabled"):
        return ["--set", "tls.source=secrets,tls.secrets.router=a,tls.secrets.worker=b,tls.secrets.redis=c"]
    return ["--set", "ray.mode=embedded"] if values.get("ray", {}).get("mode") == "kuberay" else []


def test_generated_files_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "deploy" / "helm" / "generate.py", "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_schema_is_strict_and_needs_nothing_from_elsewhere() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    nodes = [schema]
    while nodes:
        node = nodes.pop()
        nodes += [one for one in (*node.values(), *_lists(node)) if isinstance(one, dict)]
        assert node.get("$ref", "#").startswith("#")
        if "properties" in node and isinstance(node["properties"], dict) and node.get("type") == "object":
            # Helm gives a chart the globals of its parent as a whole, with those for other charts.
            is_global = "imageRegistry" in node["properties"]
            assert node["additionalProperties"] is is_global, sorted(node["properties"])


def _lists(node: dict[str, object]) -> list[object]:
    return [item for value in node.values() if isinstance(value, list) for item in value]
