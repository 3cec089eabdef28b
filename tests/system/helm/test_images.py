"""References of images: a parent chart's registry reaches each, and workers with GPUs have the suffix after any tag."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.system.helm.rendering import CHART, Rendered, Renderer, ValueSet, pods_of
from tests.system.helm.value_sets import KUBERAY, VALUE_SETS

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


def test_a_slash_after_the_registry_makes_no_difference(renderer: Renderer) -> None:
    """With two in a row it would be no reference, which shows only when a pod starts."""
    images_ = {"redis": {"image": "docker.io/library/redis:7.4.2"}}
    for registry in ("registry.example", "registry.example/"):
        found = render(renderer, 0, **{"global": {"imageRegistry": registry}}, **images_)
        assert found == {
            f"registry.example/{name}"
            for name in (*(f"baton-serve/{role}:{VERSION}" for role in ROLES), "library/redis:7.4.2")
        }


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


SPANS = {"nodes": 2, "tensorParallel": 2}
BUILT = re.search(
    r"^for target in (.*); do$", (CHART.parents[2] / "docs/kubernetes.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize("mode", ["none", "embedded", "kuberay", "external"])
def test_an_install_with_gpus_has_the_images_that_its_page_builds(mode: str, renderer: Renderer) -> None:
    """No other is in the registry: a pod of another image would never start, and `--wait` would fail."""
    assert BUILT is not None
    tags = {"router": VERSION, "prefill-cuda": f"{VERSION}-cuda", "decode-cuda": f"{VERSION}-cuda"}
    names = {target: f"{target.removesuffix('-cuda')}:{tag}" for target, tag in tags.items()}
    names["redis"] = REDIS
    built = {f"ghcr.io/baton-serve/{names[target]}" for target in BUILT[1].split()}
    values = {"ray": {"mode": mode, "external": {"dashboardUrl": "http://ray.ray:8265"}}}
    found = images(renderer.render(ValueSet(values=values, apis=KUBERAY)))
    assert found <= built
    assert mode == "external" or found == built


@pytest.mark.parametrize(
    ("values", "image"),
    [
        ({"decode": SPANS}, f"ghcr.io/baton-serve/decode:{VERSION}-cuda"),
        ({"decode": {**SPANS, "gpus": 0}}, f"ghcr.io/baton-serve/decode:{VERSION}"),
        ({"decode": {**SPANS, "image": "example.com/rocm:1"}}, "example.com/rocm:1"),
        ({"decode": SPANS, "ray": {"head": {"image": "example.com/ray:1"}}}, "example.com/ray:1"),
        (
            {"prefill": SPANS, "decode": {"image": "example.com/without-ray:1"}},
            f"ghcr.io/baton-serve/prefill:{VERSION}-cuda",
        ),
        ({"ray": {"joinWorkers": True}, "prefill": SPANS}, f"ghcr.io/baton-serve/decode:{VERSION}-cuda"),
    ],
    ids=["decode spans", "CPUs", "an image of decode workers", "its own", "prefill spans", "all join"],
)
def test_rays_head_has_an_image_with_ray(values: dict[str, Any], image: str, renderer: Renderer) -> None:
    (head,) = [
        pod for pod in pods_of(renderer.render(ValueSet(values=values))) if pod.component == "ray-head"
    ]
    assert [one["image"] for one in head.containers] == [image]


def test_a_reference_of_its_own_replaces_redis_image(renderer: Renderer) -> None:
    found = render(renderer, 0, redis={"image": "docker.io/library/redis:7.4.2-alpine"})
    assert "docker.io/library/redis:7.4.2-alpine" in found
    assert not any(REDIS in one for one in found)
