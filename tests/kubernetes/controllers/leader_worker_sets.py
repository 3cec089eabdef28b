"""LeaderWorkerSets: groups of a leader and its workers, whose pods are created, replaced and rolled together.

Of its controller (0.8) what the chart uses: one subdomain for all groups, `LeaderCreated`, `RecreateGroupOnPodRestart`,
no surge. It makes the pods itself, where the real one makes StatefulSets and its webhook completes their pods.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import yaml

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.controllers import pods
from tests.kubernetes.controllers.base import Client
from tests.kubernetes.controllers.budgets import part_of

KIND = "LeaderWorkerSet"
DOMAIN = "leaderworkerset.sigs.k8s.io"
NAME, GROUP, WORKER, REVISION = (
    f"{DOMAIN}/{label}" for label in ("name", "group-index", "worker-index", "template-revision-hash")
)
Groups = dict[int, list[Object]]


def definition() -> Object:
    """Its CustomResourceDefinition, for a cluster that is to have it."""
    folder = Path(__file__).resolve().parents[2] / "system" / "helm" / "crds"
    found = yaml.safe_load((folder / "leaderworkerset.x-k8s.io_leaderworkersets.yaml").read_text())
    spec = found["spec"] | {"scope": "Namespaced"}
    spec["versions"][0]["subresources"] = {"status": {}}
    meta = {"name": f"{spec['names']['plural']}.{spec['group']}"}
    kind = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    return {**kind, "metadata": meta, "spec": spec}


class LeaderWorkerSets:
    def __init__(self, client: Client):
        self._client = client

    def step(self) -> None:
        if not any(kind.name == KIND for kind in self._client.objects.kinds):
            return  # a cluster without its CustomResourceDefinition
        for owner in self._client.all(KIND):
            groups = self._groups(owner)
            if not pods.is_going(owner):
                self._keep_service(owner)
                self._adjust(owner, groups)
                self._roll(owner, groups)
            self._client.set_status(owner, _status(owner, groups))

    def _groups(self, owner: Object) -> Groups:
        found: Groups = defaultdict(list)
        for pod in pods.owned(self._client.all("Pod", owner["metadata"]["namespace"]), owner):
            found[int(pod["metadata"]["labels"][GROUP])].append(pod)
        return found

    def _keep_service(self, owner: Object) -> None:
        """The headless Service by which workers find their leaders, before these are ready."""
        meta = owner["metadata"]
        if self._client.find("Service", meta["namespace"], meta["name"]) is None:
            own = {key: meta[key] for key in ("name", "namespace")}
            spec = {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {NAME: meta["name"]},
            }
            document = {"apiVersion": "v1", "kind": "Service", "spec": spec}
            self._client.create(
                {**document, "metadata": {**own, "ownerReferences": [pods.reference_to(owner)]}}
            )

    def _adjust(self, owner: Object, groups: Groups) -> None:
        for index in sorted({*range(owner["spec"].get("replicas", 1)), *groups}):
            group = groups[index]
            too_many = index >= owner["spec"].get("replicas", 1)
            if too_many or any(pods.is_going(pod) or _has_restarted(pod) for pod in group):
                self._remove(group)  # created again once all of it are gone
                continue
            present = {pod["metadata"]["name"] for pod in group}
            for rank in range(owner["spec"]["leaderWorkerTemplate"]["size"]):
                pod = _made(owner, index, rank)
                if pod["metadata"]["name"] not in present:
                    self._client.create(pod)

    def _remove(self, group: list[Object]) -> None:
        for pod in group:
            if not pods.is_going(pod):
                self._client.delete(pod)

    def _roll(self, owner: Object, groups: Groups) -> None:
        replicas, size = owner["spec"].get("replicas", 1), owner["spec"]["leaderWorkerTemplate"]["size"]
        settings = owner["spec"].get("rolloutStrategy", {}).get("rollingUpdateConfiguration", {})
        most = max(1, part_of(settings.get("maxUnavailable", 1), replicas, up=True))
        missing = sum(not _is_ready(groups[index], size) for index in range(replicas))
        for index in sorted(groups, reverse=True):
            old = any(pod["metadata"]["labels"][REVISION] != _revision(owner) for pod in groups[index])
            if old and not any(pods.is_going(pod) for pod in groups[index]):
                if _is_ready(groups[index], size) and missing >= most:
                    return
                missing += _is_ready(groups[index], size)
                self._remove(groups[index])


def _made(owner: Object, index: int, rank: int) -> Object:
    """The pod of a group's rank; 0 is its leader."""
    template, name = owner["spec"]["leaderWorkerTemplate"], owner["metadata"]["name"]
    leader = f"{name}-{index}"
    own = leader if rank == 0 else f"{leader}-{rank}"
    labels = {NAME: name, GROUP: str(index), WORKER: str(rank), REVISION: _revision(owner)}
    of_leader = template.get("leaderTemplate") or template["workerTemplate"]
    pod = pods.made_from(of_leader if rank == 0 else template["workerTemplate"], owner, own, labels)
    pod["spec"] |= {"hostname": own, "subdomain": name}
    known = {
        "LWS_LEADER_ADDRESS": f"{leader}.{name}.{owner['metadata']['namespace']}",
        "LWS_GROUP_SIZE": str(template["size"]),
        "LWS_WORKER_INDEX": str(rank),
    }
    before = [{"name": variable, "value": value} for variable, value in known.items()]
    # First: values and arguments of the template may name them.
    for container in (*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]):
        container["env"] = [*before, *(container.get("env") or ())]
    return pod


def _revision(owner: Object) -> str:
    return pods.template_hash(owner["spec"]["leaderWorkerTemplate"])


def _has_restarted(pod: Object) -> bool:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return pods.is_over(pod) or any(one["restartCount"] for one in statuses)


def _is_ready(group: list[Object], size: int) -> bool:
    return len(group) == size and all(pods.is_ready(pod) for pod in group)


def _status(owner: Object, groups: Groups) -> Object:
    size = owner["spec"]["leaderWorkerTemplate"]["size"]
    ready = [index for index, group in groups.items() if _is_ready(group, size)]
    updated = [
        index
        for index, group in groups.items()
        if group and all(pod["metadata"]["labels"][REVISION] == _revision(owner) for pod in group)
    ]
    status = {
        "replicas": len([group for group in groups.values() if group]),
        "readyReplicas": len(ready),
        "updatedReplicas": len(updated),
        "conditions": (owner.get("status") or {}).get("conditions") or [],
    }
    whole = len(ready) == owner["spec"].get("replicas", 1)
    return pods.with_condition(status, "Available", whole, "AllGroupsReady" if whole else "GroupsNotReady")
