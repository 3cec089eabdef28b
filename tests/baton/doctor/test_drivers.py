"""Drivers of nodes and the CUDA of the images that the chart names for them."""

from __future__ import annotations

import pytest

from baton.doctor.checks import Check, judge
from baton.doctor.facts import Facts, Node
from baton.doctor.values import CUDA, OLDER_CUDA, OLDER_SUFFIX, values_for
from tests.baton.doctor.clusters import LARGE
from tests.docs.pages import ROOT

NEW, OLD = "nvidia.com/cuda.runtime-version.major", "nvidia.com/cuda.runtime.major"


def cluster(*labels: dict[str, str], gpus: str = "8") -> Facts:
    amounts = {**LARGE, "nvidia.com/gpu": gpus}
    return Facts(
        "v1.32.0", "serving", [Node(f"n{n}", True, True, amounts, one) for n, one in enumerate(labels)]
    )


def check(facts: Facts) -> Check:
    return next(one for one in judge(facts) if one.name == "GPU drivers")


@pytest.mark.parametrize(
    ("labels", "grade", "suffix"),
    [
        ([{NEW: "13"}], "ok", None),
        ([{NEW: "13"}, {}], "ok", None),
        ([{NEW: "13", OLD: "12"}], "ok", None),
        ([{OLD: "12"}], "warning", "-cuda12"),
        ([{NEW: "13"}, {NEW: "12"}], "warning", "-cuda12"),
        ([{NEW: "11"}], "missing", None),
        ([{NEW: "11"}, {NEW: "13"}], "warning", None),
        ([{}], "info", None),
        ([{NEW: "none"}], "info", None),
    ],
)
def test_values_name_images_that_the_drivers_can_run(
    labels: list[dict[str, str]], grade: str, suffix: str | None
) -> None:
    """Those for CUDA 12 run on drivers for CUDA 13 too; the other way round a worker finds no card."""
    facts = cluster(*labels)
    assert check(facts).grade == grade
    assert values_for(facts).get("image", {}).get("gpuSuffix") == suffix


def test_nodes_without_gpus_need_no_driver() -> None:
    facts = cluster({NEW: "12"}, gpus="0")
    assert check(facts).grade == "info" and "image" not in values_for(facts)


def test_the_advice_names_the_versions_that_are_built() -> None:
    workflow = (ROOT / ".github" / "workflows" / "images.yml").read_text()
    assert f"suffix: -cuda, cuda: cu{CUDA}0" in workflow
    assert f"suffix: {OLDER_SUFFIX}, cuda: cu{OLDER_CUDA}6" in workflow
    assert OLDER_SUFFIX in check(cluster({NEW: "12"})).advice
