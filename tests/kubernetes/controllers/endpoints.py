"""Endpoints: the addresses of the pods behind a Service, ready ones apart from the others."""

from __future__ import annotations

from collections.abc import Iterable

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.controllers import pods
from tests.kubernetes.controllers.base import Client


class EndpointsController:
    def __init__(self, client: Client):
        self._client = client

    def step(self) -> None:
        for service in self._client.all("Service"):
            if service["spec"].get("selector"):
                self._publish(service)

    def _publish(self, service: Object) -> None:
        meta = service["metadata"]
        wanted = {
            "apiVersion": "v1",
            "kind": "Endpoints",
            "metadata": {
                "name": meta["name"],
                "namespace": meta["namespace"],
                "ownerReferences": [pods.reference_to(service)],
            },
            "subsets": subsets(service, self._client.all("Pod", meta["namespace"])),
        }
        found = self._client.find("Endpoints", meta["namespace"], meta["name"])
        if found is None:
            self._client.create(wanted)
        elif (found.get("subsets") or []) != wanted["subsets"]:
            self._client.update({**found, "subsets": wanted["subsets"]})


def subsets(service: Object, all_pods: Iterable[Object]) -> list[Object]:
    spec = service["spec"]
    selector = spec["selector"].items()
    chosen = [
        pod
        for pod in all_pods
        if selector <= (pod["metadata"].get("labels") or {}).items()
        and (pod.get("status") or {}).get("podIP")
        and not pods.is_over(pod)
    ]
    found = []
    for pod in sorted(chosen, key=lambda pod: str(pod["metadata"]["name"])):
        ports = [port for port in (_port(one, pod) for one in spec.get("ports") or ()) if port]
        everyone = spec.get("publishNotReadyAddresses", False)
        listed = "addresses" if pods.is_ready(pod) or everyone else "notReadyAddresses"
        reference = {
            "kind": "Pod",
            "name": pod["metadata"]["name"],
            "namespace": pod["metadata"]["namespace"],
        }
        address: Object = {
            "ip": pod["status"]["podIP"],
            "targetRef": {**reference, "uid": pod["metadata"]["uid"]},
        }
        if pod["spec"].get("subdomain") == service["metadata"]["name"]:
            address["hostname"] = pod["spec"].get("hostname", pod["metadata"]["name"])
        found.append({listed: [address], **({"ports": ports} if ports else {})})
    return found


def _port(port: Object, pod: Object) -> Object | None:
    """None where the pod has no port of that name."""
    target = port["targetPort"]
    if isinstance(target, str):
        named = (
            one["containerPort"]
            for container in pod["spec"]["containers"]
            for one in container.get("ports") or ()
            if one.get("name") == target
        )
        target = next(named, None)
    if target is None:
        return None
    made = {"port": target, "protocol": port["protocol"]}
    return {"name": port["name"], **made} if "name" in port else made
