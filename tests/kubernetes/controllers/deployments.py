"""Deployments: one ReplicaSet for every template, the old ones scaled down as the new one comes up."""

from __future__ import annotations

import copy

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.controllers import pods
from tests.kubernetes.controllers.base import Client
from tests.kubernetes.controllers.budgets import part_of

REVISION = "deployment.kubernetes.io/revision"
HASH = "pod-template-hash"


class Deployments:
    def __init__(self, client: Client):
        self._client = client

    def step(self) -> None:
        for owner in self._client.all("Deployment"):
            sets = pods.owned(self._client.all("ReplicaSet", owner["metadata"]["namespace"]), owner)
            if pods.is_going(owner):
                continue
            new = self._new_set(owner, sets)
            old = [one for one in sets if one["metadata"]["uid"] != new["metadata"]["uid"]]
            if not owner["spec"].get("paused"):
                self._roll(owner, new, old)
            self._forget(owner, old)
            self._client.set_status(owner, _status(owner, new, old))

    def _new_set(self, owner: Object, sets: list[Object]) -> Object:
        template = owner["spec"]["template"]
        digest = pods.template_hash(template)
        found = next((one for one in sets if one["metadata"]["labels"][HASH] == digest), None)
        if found is not None:
            return found
        template = copy.deepcopy(template)
        labels = {**template["metadata"]["labels"], HASH: digest}
        template["metadata"]["labels"] = labels
        revision = 1 + max((int(one["metadata"]["annotations"][REVISION]) for one in sets), default=0)
        selector = {"matchLabels": {**(owner["spec"]["selector"].get("matchLabels") or {}), HASH: digest}}
        meta = {
            "name": f"{owner['metadata']['name']}-{digest}",
            "namespace": owner["metadata"]["namespace"],
            "labels": labels,
            "annotations": {REVISION: str(revision)},
            "ownerReferences": [pods.reference_to(owner)],
        }
        spec: Object = {"replicas": 0, "selector": selector, "template": template}
        if "minReadySeconds" in owner["spec"]:
            spec["minReadySeconds"] = owner["spec"]["minReadySeconds"]
        return self._client.create(
            {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": meta, "spec": spec}
        )

    def _roll(self, owner: Object, new: Object, old: list[Object]) -> None:
        wanted = owner["spec"]["replicas"]
        strategy = owner["spec"]["strategy"]
        if strategy["type"] == "Recreate":
            for one in old:
                self._scale(one, 0)
            if not any(_count(one, "replicas") for one in old):
                self._scale(new, wanted)
            return
        surge = part_of(strategy["rollingUpdate"]["maxSurge"], wanted, up=True)
        missing = part_of(strategy["rollingUpdate"]["maxUnavailable"], wanted, up=False)
        if surge == missing == 0:
            missing = 1
        total = sum(one["spec"]["replicas"] for one in [new, *old])
        has = new["spec"]["replicas"]
        if has > wanted:
            self._scale(new, wanted)
        elif has < wanted and total < wanted + surge:
            self._scale(new, min(wanted, has + wanted + surge - total))
        else:
            self._scale_down(new, old, wanted - missing)

    def _scale_down(self, new: Object, old: list[Object], least: int) -> None:
        """The old sets' pods that are not needed to keep `least` available."""
        total = sum(one["spec"]["replicas"] for one in [new, *old])
        not_yet = new["spec"]["replicas"] - _count(new, "availableReplicas")
        spare = total - least - not_yet
        for one in sorted(old, key=lambda one: one["metadata"]["creationTimestamp"]):
            has = one["spec"]["replicas"]
            useless = has - _count(one, "availableReplicas")
            # An unavailable pod serves no request: it may always go.
            drop = min(has, max(useless if useless > 0 else 0, min(spare, has)))
            if drop > 0:
                self._scale(one, has - drop)
                spare -= drop

    def _scale(self, one: Object, replicas: int) -> None:
        if one["spec"]["replicas"] != replicas:
            self._client.scale(one, replicas)

    def _forget(self, owner: Object, old: list[Object]) -> None:
        empty = [one for one in old if one["spec"]["replicas"] == 0 and not _count(one, "replicas")]
        empty.sort(key=lambda one: int(one["metadata"]["annotations"][REVISION]))
        limit = owner["spec"]["revisionHistoryLimit"]
        for one in empty[: max(0, len(empty) - limit)]:
            self._client.delete(one)


def _count(one: Object, name: str) -> int:
    return int((one.get("status") or {}).get(name, 0))


def _status(owner: Object, new: Object, old: list[Object]) -> Object:
    wanted = owner["spec"]["replicas"]
    total, ready, available = (
        sum(_count(one, name) for one in [new, *old])
        for name in ("replicas", "readyReplicas", "availableReplicas")
    )
    status = {
        "observedGeneration": owner["metadata"]["generation"],
        "replicas": total,
        "updatedReplicas": _count(new, "replicas"),
        "readyReplicas": ready,
        "availableReplicas": available,
        "unavailableReplicas": max(0, wanted - available),
        "conditions": (owner.get("status") or {}).get("conditions") or [],
    }
    missing = part_of(
        (owner["spec"]["strategy"].get("rollingUpdate") or {}).get("maxUnavailable", 0), wanted, up=False
    )
    enough = available >= wanted - missing
    reason = "MinimumReplicasAvailable" if enough else "MinimumReplicasUnavailable"
    status = pods.with_condition(status, "Available", enough, reason)
    complete = _count(new, "replicas") == total == wanted == available
    reason = "NewReplicaSetAvailable" if complete else "ReplicaSetUpdated"
    return pods.with_condition(status, "Progressing", True, reason)
