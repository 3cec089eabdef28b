"""A kubelet that runs nothing: pods are ready, or done, as soon as they have a node."""

from __future__ import annotations

from collections.abc import Callable

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.objects import timestamp
from tests.kubernetes.controllers import pods
from tests.kubernetes.controllers.base import Client

# What becomes of a pod: its phase and whether it is ready.
Outcome = Callable[[Object], tuple[str, bool]]


def usual(pod: Object) -> tuple[str, bool]:
    """Pods that are to run for ever run, the others have succeeded."""
    return ("Running", True) if pod["spec"]["restartPolicy"] == "Always" else ("Succeeded", False)


class InstantKubelet:
    def __init__(self, client: Client, outcome: Outcome = usual):
        self._client = client
        self._outcome = outcome
        self._addresses = 0

    def step(self) -> None:
        for pod in self._client.all("Pod"):
            if "nodeName" not in pod["spec"]:
                continue
            if pods.is_going(pod):
                self._client.delete(pod, grace_seconds=0)
            elif not pods.is_over(pod):
                self._client.set_status(pod, self._status(pod))

    def _status(self, pod: Object) -> Object:
        phase, ready = self._outcome(pod)
        old = pod["status"]
        address = old.get("podIP") or self._next_address()
        status = {**old, "phase": phase, "podIP": address, "podIPs": [{"ip": address}]}
        status.setdefault("startTime", timestamp())
        for name, value in (("Initialized", True), ("ContainersReady", ready), ("Ready", ready)):
            status = pods.with_condition(status, name, value, "Instant")
        state = {"running": {"startedAt": status["startTime"]}}
        if phase in ("Succeeded", "Failed"):
            state = {"terminated": {"exitCode": 0 if phase == "Succeeded" else 1, "reason": "Instant"}}
        status["containerStatuses"] = [
            {
                "name": one["name"],
                "image": one["image"],
                "imageID": one["image"],
                "ready": ready,
                "started": ready,
                "restartCount": 0,
                "state": state,
            }
            for one in pod["spec"]["containers"]
        ]
        return status

    def _next_address(self) -> str:
        self._addresses += 1
        return f"10.244.{self._addresses // 250}.{self._addresses % 250 + 1}"
