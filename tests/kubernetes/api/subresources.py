"""`scale`, `eviction`, service account tokens and access reviews."""

from __future__ import annotations

import copy
from typing import Any

from tests.kubernetes.api import deletion
from tests.kubernetes.api.errors import ApiError, bad_request
from tests.kubernetes.api.kinds import Kind, Object
from tests.kubernetes.api.objects import Objects
from tests.kubernetes.api.patches import patched
from tests.kubernetes.api.selectors import selects

SCALE = Kind("autoscaling/v1", "Scale", "scales")


def _at(document: Object, path: str) -> Any:
    value: Any = document
    for part in path.split("."):
        value = (value or {}).get(part)
    return value


def scale_of(kind: Kind, document: Object) -> Object:
    meta = document["metadata"]
    wanted, running = (int(_at(document, path) or 0) for path in kind.scale_paths)
    labels = ((document.get("spec") or {}).get("selector") or {}).get("matchLabels") or {}
    return {
        "apiVersion": "autoscaling/v1",
        "kind": "Scale",
        "metadata": {
            name: meta[name] for name in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        },
        "spec": {"replicas": wanted},
        "status": {
            "replicas": running,
            "selector": ",".join(f"{name}={value}" for name, value in sorted(labels.items())),
        },
    }


def set_scale(objects: Objects, kind: Kind, document: Object, scale: Object, manager: str) -> Object:
    """Writes `scale` back to its object; the manager then owns the replicas. Raises ApiError."""
    replicas = (scale.get("spec") or {}).get("replicas", 0)
    if not isinstance(replicas, int) or replicas < 0:
        raise ApiError(422, "Invalid", f"spec.replicas: {replicas!r} is not a count")
    after = copy.deepcopy(document)
    expected = (scale.get("metadata") or {}).get("resourceVersion")
    after["metadata"]["resourceVersion"] = expected or document["metadata"]["resourceVersion"]
    below = after
    *parents, last = kind.scale_paths[0].split(".")
    for part in parents:
        below = below.setdefault(part, {})
    below[last] = replicas
    return scale_of(kind, objects.update(kind, after, manager))


def patch_scale(
    objects: Objects, kind: Kind, document: Object, body: Any, content_type: str, manager: str
) -> Object:
    if content_type == "application/apply-patch+yaml":
        content_type = "application/merge-patch+json"
    before = scale_of(kind, document)
    schemaless = Kind(SCALE.api_version, SCALE.name, SCALE.plural)
    after = patched(schemaless, before, body, content_type)
    if isinstance(body, dict) and not (body.get("metadata") or {}).get("resourceVersion"):
        after["metadata"].pop("resourceVersion", None)
    return set_scale(objects, kind, document, after, manager)


def evict(objects: Objects, namespace: str, name: str, body: Object) -> Object:
    """Deletes a pod unless a disruption budget forbids it (429)."""
    pods, budgets = objects.kinds.named("Pod"), objects.kinds.named("PodDisruptionBudget")
    with objects.store.lock:
        pod = objects.get(pods, namespace, name)
        labels = pod["metadata"].get("labels") or {}
        for budget in objects.store.of_kind(budgets, namespace):
            allowed = (budget.get("status") or {}).get("disruptionsAllowed", 0)
            if selects(budget["spec"].get("selector"), labels) and allowed < 1:
                raise ApiError(
                    429,
                    "TooManyRequests",
                    "Cannot evict pod as it would violate the pod's disruption budget.",
                )
        options = deletion.Options.of(body.get("deleteOptions") or {})
        return deletion.delete(objects, pods, namespace, name, options)


def bind(objects: Objects, namespace: str, name: str, body: Object) -> Object:
    node = (body.get("target") or {}).get("name")
    if not node:
        raise bad_request("target.name: required")

    def place(pod: Object) -> Object:
        pod["spec"]["nodeName"] = node
        return pod

    return objects.change(objects.kinds.named("Pod"), namespace, name, place, "scheduler")
