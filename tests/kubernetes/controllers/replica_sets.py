"""ReplicaSets: as many pods as wanted."""

from __future__ import annotations

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.controllers import pods
from tests.kubernetes.controllers.base import Client


class ReplicaSets:
    def __init__(self, client: Client):
        self._client = client

    def step(self) -> None:
        for owner in self._client.all("ReplicaSet"):
            mine = pods.owned(self._client.all("Pod", owner["metadata"]["namespace"]), owner)
            if not pods.is_going(owner):
                self._adjust(owner, mine)
            self._client.set_status(owner, _status(owner, mine))

    def _adjust(self, owner: Object, mine: list[Object]) -> None:
        for pod in mine:
            if pods.phase(pod) == "Failed" and not pods.is_going(pod):
                self._client.delete(pod)
        alive = [pod for pod in mine if not pods.is_going(pod) and not pods.is_over(pod)]
        wanted = owner["spec"]["replicas"]
        for _ in range(wanted - len(alive)):
            name = f"{owner['metadata']['name']}-"
            self._client.create(pods.made_from(owner["spec"]["template"], owner, name))
        # Those that are not ready yet go first.
        for pod in sorted(alive, key=pods.is_ready)[: max(0, len(alive) - wanted)]:
            self._client.delete(pod)


def _status(owner: Object, mine: list[Object]) -> Object:
    alive = [pod for pod in mine if not pods.is_going(pod) and not pods.is_over(pod)]
    least = owner["spec"].get("minReadySeconds", 0)
    return {
        "observedGeneration": owner["metadata"]["generation"],
        "replicas": len(alive),
        "fullyLabeledReplicas": len(alive),
        "readyReplicas": len([pod for pod in alive if pods.is_ready(pod)]),
        "availableReplicas": len([pod for pod in alive if pods.is_available(pod, least)]),
    }
