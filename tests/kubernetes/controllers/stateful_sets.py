"""StatefulSets: pods with ordinals, replaced from the last to the first, each when those before it are ready."""

from __future__ import annotations

import copy

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.selectors import labels_of, selects
from tests.kubernetes.controllers import pods
from tests.kubernetes.controllers.base import Client
from tests.kubernetes.controllers.budgets import part_of

REVISION = "controller-revision-hash"


class StatefulSets:
    def __init__(self, client: Client):
        self._client = client

    def step(self) -> None:
        for owner in self._client.all("StatefulSet"):
            if not pods.is_going(owner):
                self._adopt(owner)
            update = self._revision(owner)
            status = owner.get("status") or {}
            current = status.get("currentRevision") or update
            mine = pods.owned(self._client.all("Pod", owner["metadata"]["namespace"]), owner)
            if not pods.is_going(owner):
                self._adjust(owner, mine, current, update)
            self._client.set_status(owner, _status(owner, mine, current, update))

    def _adopt(self, owner: Object) -> None:
        """Pods and revisions that a StatefulSet left behind (`--cascade=orphan`)."""
        for kind in ("Pod", "ControllerRevision"):
            for one in self._client.all(kind, owner["metadata"]["namespace"]):
                named = one["metadata"]["name"].rpartition("-")[0] == owner["metadata"]["name"]
                orphaned = not pods.owner_uid(one) and not pods.is_going(one)
                if named and orphaned and selects(owner["spec"]["selector"], labels_of(one)):
                    self._client.adopt(one, pods.reference_to(owner))

    def _revision(self, owner: Object) -> str:
        """The name of the ControllerRevision that keeps the template, made if it is new."""
        template = owner["spec"]["template"]
        name = f"{owner['metadata']['name']}-{pods.template_hash(template)}"
        space = owner["metadata"]["namespace"]
        if not pods.is_going(owner) and self._client.find("ControllerRevision", space, name) is None:
            known = pods.owned(self._client.all("ControllerRevision", space), owner)
            self._client.create(
                {
                    "apiVersion": "apps/v1",
                    "kind": "ControllerRevision",
                    "metadata": {
                        "name": name,
                        "namespace": space,
                        "labels": (template.get("metadata") or {}).get("labels") or {},
                        "ownerReferences": [pods.reference_to(owner)],
                    },
                    "data": {"template": copy.deepcopy(template)},
                    "revision": 1 + max((one["revision"] for one in known), default=0),
                }
            )
        return name

    def _adjust(self, owner: Object, mine: list[Object], current: str, update: str) -> None:
        by_ordinal = {_ordinal(pod): pod for pod in mine}
        wanted = owner["spec"]["replicas"]
        ordered = owner["spec"]["podManagementPolicy"] == "OrderedReady"
        for pod in mine:
            if pods.is_over(pod) and not pods.is_going(pod):
                self._client.delete(pod)
                return
        if not all(_has_claims(owner, pod) for pod in mine if not pods.is_going(pod)):
            # Kubernetes' controller tries to change the volumes of such a pod, which the API refuses, and takes no other
            # step before the pod is deleted by hand.
            return
        for ordinal in range(wanted):
            if ordinal not in by_ordinal:
                revision = self._revision_for(owner, ordinal, mine, current, update)
                self._create(owner, ordinal, revision)
                if ordered:
                    return
            elif ordered and not pods.is_ready(by_ordinal[ordinal]):
                return
        for ordinal in sorted((one for one in by_ordinal if one >= wanted), reverse=True):
            if not pods.is_going(by_ordinal[ordinal]):
                self._client.delete(by_ordinal[ordinal])
            if ordered:
                return
        self._roll(owner, by_ordinal, update)

    def _revision_for(
        self, owner: Object, ordinal: int, mine: list[Object], current: str, update: str
    ) -> str:
        """A pod that dies in the middle of a roll comes back as what it was until the roll has reached it."""
        if current == update or owner["spec"]["updateStrategy"]["type"] != "RollingUpdate":
            return update
        if ordinal < _partition(owner):
            return current
        if self._client.find("ControllerRevision", owner["metadata"]["namespace"], current) is None:
            return update
        reached = [_ordinal(pod) for pod in mine if pod["metadata"]["labels"][REVISION] == update]
        lowest = min(reached, default=owner["spec"]["replicas"])
        return update if ordinal >= lowest - 1 else current

    def _create(self, owner: Object, ordinal: int, revision: str) -> None:
        space = owner["metadata"]["namespace"]
        kept = self._client.find("ControllerRevision", space, revision)
        template = kept["data"]["template"] if kept else owner["spec"]["template"]
        name = f"{owner['metadata']['name']}-{ordinal}"
        labels = {
            REVISION: revision,
            "statefulset.kubernetes.io/pod-name": name,
            "apps.kubernetes.io/pod-index": str(ordinal),
        }
        pod = pods.made_from(template, owner, name, labels)
        pod["spec"] |= {"hostname": name, "subdomain": owner["spec"]["serviceName"]}
        for claim in owner["spec"].get("volumeClaimTemplates") or ():
            self._claim(owner, claim, pod)
        self._client.create(pod)

    def _claim(self, owner: Object, claim: Object, pod: Object) -> None:
        space = owner["metadata"]["namespace"]
        volume, name = claim["metadata"]["name"], _claim_name(claim, pod)
        kept = [one for one in pod["spec"].get("volumes") or () if one["name"] != volume]
        pod["spec"]["volumes"] = [*kept, {"name": volume, "persistentVolumeClaim": {"claimName": name}}]
        if self._client.find("PersistentVolumeClaim", space, name) is None:
            meta: Object = {"name": name, "namespace": space, "labels": claim["metadata"].get("labels") or {}}
            if owner["spec"]["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Delete":
                meta["ownerReferences"] = [pods.reference_to(owner)]
            self._client.create(
                {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": claim["spec"]}
            )

    def _roll(self, owner: Object, by_ordinal: dict[int, Object], update: str) -> None:
        strategy = owner["spec"]["updateStrategy"]
        if strategy["type"] != "RollingUpdate":
            return
        limit = max(
            1, part_of(strategy["rollingUpdate"].get("maxUnavailable", 1), owner["spec"]["replicas"], up=True)
        )
        missing = 0
        for ordinal in range(owner["spec"]["replicas"] - 1, _partition(owner) - 1, -1):
            pod = by_ordinal.get(ordinal)
            if pod is None:
                missing += 1
            elif pod["metadata"]["labels"][REVISION] != update and not pods.is_going(pod):
                self._client.delete(pod)
                missing += 1
            elif not pods.is_available(pod, owner["spec"].get("minReadySeconds", 0)):
                missing += 1
            if missing >= limit:
                return


def _claim_name(claim: Object, pod: Object) -> str:
    return f"{claim['metadata']['name']}-{pod['metadata']['name']}"


def _has_claims(owner: Object, pod: Object) -> bool:
    """Whether each claim of the template is a volume of the pod; an adopted pod may be of another template."""
    there = {
        one["name"]: (one.get("persistentVolumeClaim") or {}).get("claimName")
        for one in pod["spec"].get("volumes") or ()
    }
    templates = owner["spec"].get("volumeClaimTemplates") or ()
    return all(there.get(one["metadata"]["name"]) == _claim_name(one, pod) for one in templates)


def _ordinal(pod: Object) -> int:
    return int(pod["metadata"]["name"].rpartition("-")[2])


def _partition(owner: Object) -> int:
    return int((owner["spec"]["updateStrategy"].get("rollingUpdate") or {}).get("partition", 0))


def _status(owner: Object, mine: list[Object], current: str, update: str) -> Object:
    alive = [pod for pod in mine if not pods.is_going(pod)]
    ready = [pod for pod in alive if pods.is_ready(pod)]
    updated = [pod for pod in alive if pod["metadata"]["labels"][REVISION] == update]
    wanted = owner["spec"]["replicas"]
    if len(updated) == len(ready) == len(mine) == wanted:
        current = update
    least = owner["spec"].get("minReadySeconds", 0)
    return {
        "observedGeneration": owner["metadata"]["generation"],
        "replicas": len(alive),
        "readyReplicas": len(ready),
        "availableReplicas": len([pod for pod in ready if pods.is_available(pod, least)]),
        "currentReplicas": len([pod for pod in alive if pod["metadata"]["labels"][REVISION] == current]),
        "updatedReplicas": len(updated),
        "currentRevision": current,
        "updateRevision": update,
        "collisionCount": 0,
    }
