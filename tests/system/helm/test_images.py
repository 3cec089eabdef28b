"""References of images: a parent chart's registry reaches each, and workers with GPUs have the suffix after any tag."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.system.helm.rendering import CHART, Rendered, Renderer, ValueSet, pods_of
from tests.system.helm.value_sets import VALUE_SETS

pytestmark = pytest.mark.system
ROLES = ("router", "prefill", "decode")
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
REDIS = f"redis:{yaml.safe_load((CHART / 'values.yaml').read_text())['redis']['tag']}"


def images(rendered: Rendered) -> set[str]:
    """Those of all containers, without those that a hook of the values brings."""
    found = {container["image"] for pod in pods_of(rendered) for container in pod.containers}
    return {one for one in found if not one.startswith("example/")}


def render(renderer: Renderer, gpus: int, **values: Any) -> set[str]:
    pools = {role: {"gpus": gpus} for role in ("prefill", "decode")}
    return images(renderer.render(ValueSet(values={**pools, **values})))


@pytest.mark.parametrize("name", list(VALUE_SETS))
def test_the_registry_of_a_parent_chart_reaches_every_image(name: str, renderer: Renderer) -> None:
    values = VALUE_SETS[name]
    above = {**values.values, "global": {"imageRegistry": "registry.example"}}
    found = images(renderer.render(ValueSet(**{**vars(values), "values": above})))
    assert found
    for one in found:
        assert one.startswith("registry.example/"), one


@pytest.mark.parametrize(
    ("image", "router", "workers"),
    [
        ({}, VERSION, f"{VERSION}-cuda"),
        ({"tag": "next"}, "next", "next-cuda"),
        ({"tag": "next-cuda"}, "next-cuda", "next-cuda"),
        ({"tag": "next", "gpuSuffix": "-cuda12"}, "next", "next-cuda12"),
        ({"gpuSuffix": ""}, VERSION, VERSION),
    ],
    ids=["default", "a tag", "a tag with the suffix", "another suffix", "none"],
)
def test_the_suffix_of_gpu_workers_survives_the_tag(
    renderer: Renderer, image: dict[str, str], router: str, workers: str
) -> None:
    there = "ghcr.io/baton-serve"
    expected = {f"{there}/router:{router}", f"{there}/{REDIS}"}
    found = render(renderer, 1, image=image)
    assert expected | {f"{there}/{role}:{workers}" for role in ("prefill", "decode")} <= found
    without = render(renderer, 0, image=image)
    assert {f"{there}/{role}:{router}" for role in ROLES} <= without


def test_a_reference_of_its_own_replaces_redis_image(renderer: Renderer) -> None:
    found = render(renderer, 0, redis={"image": "docker.io/library/redis:7.4.2-alpine"})
    assert "docker.io/library/redis:7.4.2-alpine" in found
    assert not any(REDIS in one for one in found)
