"""A few renderings as a whole, so that a change of the chart shows as what it does to a cluster.

`make chart-golden` writes them again; read the difference before committing it.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import yaml

from tests.system.helm.rendering import Manifest, Renderer
from tests.system.helm.value_sets import VALUE_SETS

pytestmark = pytest.mark.system
GOLDEN = Path(__file__).parent / "golden"
NAMES = ("cpu-demo", "rdma-mtls", "multi-node", "external", "kuberay", "autoscaling", "several models")


def _from_a_file(one: Manifest) -> bool:
    """Rules and dashboards are files of their own, tested elsewhere."""
    return one["kind"] == "PrometheusRule" or "-dashboard-" in one["metadata"]["name"]


def _told(name: str, renderer: Renderer) -> str:
    """The manifests in an order of their own, without what is drawn for every rendering."""
    manifests = copy.deepcopy(renderer.render(VALUE_SETS[name]).manifests)
    for one in manifests:
        if one["kind"] == "Secret" and one.get("data"):
            one["data"] = dict.fromkeys(one["data"], "(drawn at random)")
    manifests = [one for one in manifests if not _from_a_file(one)]
    manifests.sort(key=lambda one: (one["kind"], one["metadata"]["name"]))
    return yaml.safe_dump_all(manifests, sort_keys=True, width=120, allow_unicode=True)


@pytest.mark.parametrize("name", NAMES)
def test_renderings_equal_the_committed_ones(name: str, renderer: Renderer) -> None:
    file = GOLDEN / f"{name.replace(' ', '-')}.yaml"
    told = _told(name, renderer)
    if os.environ.get("BATON_WRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(told)
    assert file.read_text() == told, (
        f"{file.name} differs: make chart-golden writes it again, if that is wanted"
    )
