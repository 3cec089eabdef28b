"""Blocks of the documentation that need a cluster: in their order, with real Helm and kubectl, as they are written.

The pods are ready at once. Those that ask pods for tokens run in test_processes.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ON_CLUSTER, ROOT, Block, blocks
from tests.kubernetes.controllers.cluster import instant_cluster
from tests.system.conftest import _install
from tests.system.helm.rendering import Renderer, ValueSet
from tests.system.helm.value_sets import CERTS, GATEWAY, GROUPS, KUBERAY
from tests.system.helm_life.helm import kubectl

pytestmark = pytest.mark.system
NODE = {"cpu": "96", "memory": "1Ti", "pods": "250", "nvidia.com/gpu": "8"}
VALUES = "values of the chart"
PAGES = ("docs/kubernetes.md", "README.md")
SECONDS = 300  # of a busy machine


def of_page(page: str) -> list[Block]:
    return [one for one in blocks() if one.page == page]


def written(place: Path) -> Path:
    """A folder in which the page's paths and programs work."""
    for path in ROOT.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            (place / path.name).symlink_to(path)
    programs = place / "programs"
    programs.mkdir()
    (programs / "helm").symlink_to(_install(4))
    (programs / "kubectl").symlink_to(kubectl())
    (programs / "baton").write_text(f'#!/bin/sh\nexec {sys.executable} -m baton "$@"\n')
    (programs / "baton").chmod(0o755)
    return programs


def run(block: Block, place: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=place,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def said_by(page: str, place: Path) -> Iterator[tuple[Block, str]]:
    with instant_cluster() as server:
        for name in ("gpu-0", "gpu-1"):
            server.add_node(name, {}, NODE)
        programs = written(place)
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(place),
            "KUBECONFIG": str(server.kubeconfig(place / "kubeconfig")),
        }
        for block in of_page(page):
            if named := re.fullmatch(rf"{VALUES}, {ON_CLUSTER} as ([a-z-]+\.yaml)", block.marker):
                (place / named[1]).write_text(block.text)
            elif block.marker == ON_CLUSTER:
                yield block, run(block, place, environment)


def test_the_page_works_from_an_empty_cluster_to_its_removal(tmp_path: Path) -> None:
    said = {block.text.split("\n", 1)[0]: text for block, text in said_by("docs/kubernetes.md", tmp_path)}

    def of(start: str) -> str:
        return next(text for line, text in said.items() if line.startswith(start))

    assert "16 × nvidia.com/gpu" in of("baton doctor")
    installed = of("helm install")
    assert "STATUS: deployed" in installed and installed.count("Phase:          Succeeded") >= 5
    assert "baton-decode-0" in installed
    images = of("helm template").split()
    assert {one.rsplit("/", 1)[-1].split(":")[0] for one in images} == {
        "router",
        "prefill",
        "decode",
        "redis",
    }
    assert all(re.fullmatch(r"[a-z0-9./-]+:[A-Za-z0-9._-]+", one) for one in images), images
    assert "Rollback was a success" in of(
        "helm upgrade baton deploy/helm/baton -f mine.yaml -f model.yaml --set"
    )
    assert "uninstalled" in of("helm uninstall")


@pytest.mark.parametrize(
    "block",
    [one for page in PAGES for one in of_page(page) if one.marker.startswith(VALUES)],
    ids=str,
)
def test_values_of_the_page_render(block: Block, renderer: Renderer) -> None:
    apis = (*CERTS, *KUBERAY, *GROUPS, *GATEWAY)
    values = json.loads(json.dumps(yaml.safe_load(block.text)))
    model = {"source": "pvc://models/any", **values.pop("model", {})}
    assert renderer.render(ValueSet(values={**values, "model": model}, apis=apis, kube="1.34.0")).manifests


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(_install(4))
