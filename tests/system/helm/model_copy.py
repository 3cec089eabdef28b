"""The container of the chart's pods that copies a model from an object store on this machine."""

from __future__ import annotations

from typing import Any

from tests.harness.object_store import FOLDER
from tests.system.helm.rendering import Renderer, ValueSet, pods_of


def copy_container(renderer: Renderer, component: str, port: int) -> dict[str, Any]:
    values = {
        "model": {
            "source": f"s3://weights/{FOLDER}",
            "s3": {"endpoint": f"http://127.0.0.1:{port}", "provider": "Other", "credentialsSecret": "key"},
        }
    }
    (pod,) = [one for one in pods_of(renderer.render(ValueSet(values=values))) if one.component == component]
    (found,) = pod.spec["initContainers"]
    return dict(found)


def environment(container: dict[str, Any]) -> dict[str, str]:
    """With what the Secret holds."""
    plain = {one["name"]: one["value"] for one in container["env"]}
    return {**plain, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
