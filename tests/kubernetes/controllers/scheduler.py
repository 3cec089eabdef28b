"""Gives pods a node that has room: selectors, taints, required affinity and requested amounts count."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.quantity import amount
from tests.kubernetes.api.selectors import selects
from tests.kubernetes.controllers import pods
from tests.kubernetes.controllers.base import Client

# Where a test adds no nodes there is this one, and it has room for everything.
ONLY_NODE = "node"


class Scheduler:
    def __init__(self, client: Client):
        self._client = client

    def step(self) -> None:
        waiting = [
            pod for pod in self._client.all("Pod") if "nodeName" not in pod["spec"] and not pods.is_going(pod)
        ]
        for pod in waiting:
            if missing := self._missing_claim(pod):
                self._explain(pod, f'persistentvolumeclaim "{missing}" not found')
            elif nodes := self._client.all("Node"):
                self._choose(pod, nodes)
            else:
                self._bind(pod, ONLY_NODE)

    def _missing_claim(self, pod: Object) -> str:
        for volume in pod["spec"].get("volumes") or ():
            name = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            if name and not self._client.find("PersistentVolumeClaim", pod["metadata"]["namespace"], name):
                return str(name)
        return ""

    def _choose(self, pod: Object, nodes: list[Object]) -> None:
        reasons: dict[str, int] = defaultdict(int)
        placed = self._client.all("Pod")
        for node in nodes:
            reason = next(_objections(pod, node, placed), "")
            if not reason:
                self._bind(pod, node["metadata"]["name"])
                return
            reasons[reason] += 1
        listed = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        self._explain(pod, f"0/{len(nodes)} nodes are available: {listed}.")

    def _bind(self, pod: Object, node: str) -> None:
        def write(live: Object) -> Object:
            live["spec"]["nodeName"] = node
            return live

        meta = pod["metadata"]
        bound = self._client.objects.change(
            self._client.kind("Pod"), meta["namespace"], meta["name"], write, "scheduler"
        )
        self._client.set_status(
            bound, pods.with_condition(bound["status"], "PodScheduled", True, "Scheduled")
        )

    def _explain(self, pod: Object, message: str) -> None:
        status = pods.with_condition(pod["status"], "PodScheduled", False, "Unschedulable", message)
        self._client.set_status(pod, status)


def requests_of(pod: Object) -> Mapping[str, float]:
    wanted: dict[str, float] = defaultdict(float)
    wanted["pods"] = 1
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        # A limit without a request is the request.
        for name, quantity in {
            **(resources.get("limits") or {}),
            **(resources.get("requests") or {}),
        }.items():
            wanted[name] += amount(quantity)
    return wanted


def _objections(pod: Object, node: Object, placed: list[Object]) -> Iterator[str]:
    labels = node["metadata"].get("labels") or {}
    spec = pod["spec"]
    if node["spec"].get("unschedulable"):
        yield "node(s) were unschedulable"
    if not (spec.get("nodeSelector") or {}).items() <= labels.items() or not _affinity_fits(spec, labels):
        yield "node(s) didn't match Pod's node affinity/selector"
    if any(
        not _tolerated(taint, spec.get("tolerations") or ()) for taint in node["spec"].get("taints") or ()
    ):
        yield "node(s) had untolerated taint(s)"
    name = node["metadata"]["name"]
    here = [one for one in placed if one["spec"].get("nodeName") == name and not pods.is_over(one)]
    for resource, wanted in requests_of(pod).items():
        free = amount(node["status"]["allocatable"].get(resource, 0))
        free -= sum(requests_of(one).get(resource, 0.0) for one in here)
        if wanted > free + 1e-9:
            yield f"Insufficient {resource}"


def _affinity_fits(spec: Object, labels: Mapping[str, str]) -> bool:
    node_affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if not required:
        return True
    return any(selects(term, labels) for term in required["nodeSelectorTerms"])


def _tolerated(taint: Object, tolerations: object) -> bool:
    if taint["effect"] == "PreferNoSchedule":
        return True
    assert isinstance(tolerations, list | tuple)
    for one in tolerations:
        if one.get("effect") not in (None, "", taint["effect"]) or one.get("key") not in (
            None,
            "",
            taint["key"],
        ):
            continue
        if one.get("operator", "Equal") == "Exists" or one.get("value", "") == taint.get("value", ""):
            return True
    return False
