"""Renders the chart with a real Helm, each set of values once."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "baton"
Manifest: TypeAlias = dict[str, Any]
SECONDS = 120
AT_ONCE = 4


@dataclass(frozen=True)
class ValueSet:
    """Values to install with, and the cluster they are for."""

    files: tuple[str, ...] = ()  # of the chart's values/
    values: Mapping[str, Any] = field(default_factory=dict)
    apis: tuple[str, ...] = ()
    kube: str = "1.32.0"
    since: str = "1.29"  # the oldest Kubernetes whose schemas it fits


@dataclass(frozen=True)
class Rendered:
    code: int
    text: str
    error: str

    @cached_property
    def manifests(self) -> list[Manifest]:
        assert self.code == 0, self.error
        return [one for one in yaml.load_all(self.text, Loader=yaml.CSafeLoader) if one]

    def of(self, *kinds: str) -> list[Manifest]:
        return [one for one in self.manifests if one["kind"] in kinds]

    def named(self, kind: str, name: str) -> Manifest:
        (found,) = [one for one in self.of(kind) if one["metadata"]["name"] == name]
        return found


class Renderer:
    def __init__(self, helm: Path):
        self.helm = helm
        self._done: dict[str, Rendered] = {}

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.helm, *arguments], input=stdin, capture_output=True, text=True, timeout=SECONDS, check=False
        )

    def render(self, wanted: ValueSet) -> Rendered:
        key = repr(wanted)
        if key not in self._done:
            arguments = ["template", "t", str(CHART), "--namespace", "serving", "--kube-version", wanted.kube]
            arguments += [part for api in wanted.apis for part in ("--api-versions", api)]
            arguments += [part for name in wanted.files for part in ("-f", str(CHART / "values" / name))]
            done = self.run(*arguments, "-f", "-", stdin=json.dumps(wanted.values))
            self._done[key] = Rendered(done.returncode, done.stdout, done.stderr)
        return self._done[key]

    def render_all(self, wanted: Sequence[ValueSet]) -> list[Rendered]:
        """In their order; Helm is a process, so threads are enough to keep the processors busy."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self.render, wanted))


# --- what manifests say ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pod:
    """A template that pods are made from."""

    owner: str
    component: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Mapping[str, Any]
    manifest: Manifest

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        listed = [port for one in self.spec["containers"] for port in one.get("ports", [])]
        return {port["name"]: port["containerPort"] for port in listed}


def pods_of(rendered: Rendered) -> list[Pod]:
    """Every pod template, those inside a RayService too."""
    found = []
    for one in rendered.manifests:
        for template in templates_of(one):
            metadata = template["metadata"]
            labels = metadata["labels"]
            owner = f"{one['kind']}/{one['metadata']['name']}"
            component = labels["app.kubernetes.io/component"]
            annotations = metadata.get("annotations", {})
            found.append(Pod(owner, component, labels, annotations, template["spec"], one))
    return found


def templates_of(one: Manifest) -> list[dict[str, Any]]:
    """Templates of pods in a manifest."""
    spec = one.get("spec") or {}
    if one["kind"] == "RayService":
        cluster = spec["rayClusterConfig"]
        return [cluster["headGroupSpec"]["template"], *(g["template"] for g in cluster["workerGroupSpecs"])]
    if one["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    return (
        [spec["template"]] if "template" in spec and "containers" in spec["template"].get("spec", {}) else []
    )


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Does a label selector (matchLabels and `In` expressions, as the chart writes them) choose these labels?"""
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for expression in selector.get("matchExpressions") or []:
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True
