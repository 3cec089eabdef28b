"""Every process of the chart that compiles kernels has a place of its own for them, which outlives its container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

GOLDEN = Path(__file__).resolve().parents[1] / "system/helm/golden"
CACHES = ("TRITON_CACHE_DIR", "NUMBA_CACHE_DIR")


def pods(node: Any) -> Iterator[dict[str, Any]]:
    """Every pod's specification, however deep it lies."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for value in node.values():
            yield from pods(value)
    elif isinstance(node, list):
        for value in node:
            yield from pods(value)


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.yaml")), ids=lambda file: file.stem)
def test_caches_of_kernels_lie_in_a_volume_of_the_pod(file: Path) -> None:
    found = 0
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for pod in pods(list(yaml.load_all(file.read_text(), loader))):
        kinds = {volume["name"]: volume for volume in pod.get("volumes", ())}
        for container in pod["containers"]:
            set_here = {one["name"]: one.get("value", "") for one in container.get("env", ())}
            for name in CACHES:
                if name not in set_here:
                    continue
                found += 1
                above = PurePosixPath(set_here[name]).parents
                mount = next(
                    one for one in container["volumeMounts"] if PurePosixPath(one["mountPath"]) in above
                )
                assert not mount.get("readOnly") and "emptyDir" in kinds[mount["name"]], (
                    name,
                    container["name"],
                )
    assert found >= 4
