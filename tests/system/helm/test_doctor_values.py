"""The values that `baton doctor --values` prints are accepted by the chart, and fit the cluster."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from baton.doctor.facts import CERT_MANAGER, KUBERAY, PROMETHEUS, RULES, Facts, Node, Permission, Taint
from baton.doctor.pods import pods_of as doctor_pods
from baton.doctor.values import values_for
from tests.kubernetes.api.server import ApiServer
from tests.kubernetes.controllers.base import Client
from tests.kubernetes.controllers.scheduler import Scheduler, requests_of
from tests.system.helm.rendering import Pod, Rendered, Renderer, ValueSet, pods_of
from tests.system.helm.value_sets import CERTS

pytestmark = pytest.mark.system
H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "topology.kubernetes.io/zone": "a"}


LARGE = {"cpu": "96", "memory": "1Ti", "pods": "250"}


def node(allocatable: dict[str, str], name: str = "one", **more: Any) -> Node:
    allocatable = {**LARGE, **allocatable}
    return Node(name, **{"ready": True, "schedulable": True, "labels": {}, **more}, allocatable=allocatable)


CPU = node({}, "cpu")  # where what tolerates nothing goes
GPU = node(
    {"nvidia.com/gpu": "8", "rdma/hca_shared_devices_a": "1000"},
    labels=H100,
    taints=[Taint("nvidia.com/gpu", "", "NoSchedule"), Taint("team", "ml", "NoSchedule")],
)
OPERATORS = {name: ["v1"] for name in (*CERT_MANAGER, *PROMETHEUS, RULES, KUBERAY)}
CLUSTERS: dict[str, Facts] = {
    "bare": Facts("v1.32.0", "serving", [node({})]),
    "small": Facts("v1.32.0", "serving", [node({"cpu": "4", "memory": "12Gi"})]),
    "gpus": Facts("v1.32.0", "serving", [GPU, CPU]),
    "one gpu": Facts("v1.32.0", "serving", [node({"nvidia.com/gpu": "1"})]),
    "one gpu of each kind": Facts(
        "v1.32.0", "serving", [node({"nvidia.com/gpu": "1"}, "a"), node({"amd.com/gpu": "1"}, "b")]
    ),
    "mig": Facts("v1.32.0", "serving", [node({"nvidia.com/mig-3g.40gb": "2"})]),
    "older drivers": Facts(
        "v1.32.0",
        "serving",
        [node({"nvidia.com/gpu": "8"}, labels={"nvidia.com/cuda.runtime-version.major": "12"})],
    ),
    "operators": Facts("v1.32.0", "serving", [GPU, CPU], OPERATORS),
    "few rights": Facts(
        "v1.32.0",
        "serving",
        [GPU, CPU],
        permissions=[
            Permission(
                "rbac.authorization.k8s.io", "clusterroles", feature="topology.enabled", allowed=False
            ),
            Permission("rbac.authorization.k8s.io", "roles", feature="peerExits.enabled", allowed=False),
        ],
    ),
}


def rendered_for(name: str, renderer: Renderer) -> Rendered:
    facts = CLUSTERS[name]
    apis = (*CERTS, "ray.io/v1") if CERT_MANAGER[0] in facts.crds else ()
    rendered = renderer.render(ValueSet(values=values_for(facts), apis=apis))
    assert rendered.code == 0, rendered.error
    return rendered


def started(rendered: Rendered) -> list[Pod]:
    """Every pod that runs after the install, as often as there are replicas; no Jobs of `helm test`."""
    pods = []
    for pod in pods_of(rendered):
        if pod.manifest["kind"] != "Job":
            pods += [pod] * pod.manifest["spec"].get("replicas", 1)
    return pods


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_chart_renders_with_them(name: str, renderer: Renderer) -> None:
    facts = CLUSTERS[name]
    rendered = rendered_for(name, renderer)
    workers = {pod.component: pod for pod in pods_of(rendered) if pod.component in ("prefill", "decode")}
    assert workers.keys() == {"prefill", "decode"}
    assert "RayService" not in {one["kind"] for one in rendered.manifests}
    for pod in workers.values():
        limits = next(one for one in pod.spec["containers"] if one["name"] == "worker")["resources"]["limits"]
        assert pod.spec.get("nodeSelector", {}).items() <= H100.items()
        assert any("/" in key for key in limits) == bool(facts.gpu_nodes)
    kinds = {one["kind"] for one in rendered.manifests}
    assert ("Certificate" in kinds) == (CERT_MANAGER[0] in facts.crds)
    assert ("ServiceMonitor" in kinds) == (PROMETHEUS[0] in facts.crds)
    has_zones = any(set(node.labels) & set(H100) for node in facts.nodes)
    assert ("ClusterRole" in kinds) == (has_zones and name != "few rights")
    assert ("Role" in kinds) == (name != "few rights")


@pytest.mark.parametrize("name", CLUSTERS)
def test_doctor_counts_the_pods_that_the_chart_makes(name: str, renderer: Renderer) -> None:
    made = Counter(
        (pod.component, _asked({"spec": pod.spec})) for pod in started(rendered_for(name, renderer))
    )
    counted = Counter(
        (need.name, tuple(sorted(need.amounts.items()))) for need in doctor_pods(values_for(CLUSTERS[name]))
    )
    assert counted == made


def _asked(pod: Any) -> tuple[tuple[str, float], ...]:
    return tuple(sorted((key, count) for key, count in requests_of(pod).items() if key != "pods"))


@pytest.mark.parametrize("name", CLUSTERS)
def test_all_pods_find_a_node(name: str, renderer: Renderer) -> None:
    """By a scheduler that is not doctor's own."""
    pods = started(rendered_for(name, renderer))
    with ApiServer() as server:
        for one in CLUSTERS[name].nodes:
            made = server.add_node(one.name, dict(one.labels), dict(one.allocatable))
            made["spec"]["taints"] = [
                {"key": taint.key, "effect": taint.effect, **({"value": taint.value} if taint.value else {})}
                for taint in one.taints
            ]
            server.update(made)
        for index, pod in enumerate(
            sorted(pods, key=lambda pod: len(_asked({"spec": pod.spec})), reverse=True)
        ):
            server.create(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": f"{pod.component}-{index}", "labels": dict(pod.labels)},
                    "spec": {**pod.spec, "serviceAccountName": "default"},
                }
            )
        Scheduler(Client(server.objects_api)).step()
        left = [one["metadata"]["name"] for one in server.objects("Pod") if "nodeName" not in one["spec"]]
    assert not left


def test_workers_on_older_drivers_get_the_images_for_them(renderer: Renderer) -> None:
    pods = {pod.component: pod for pod in pods_of(rendered_for("older drivers", renderer))}
    for role in ("prefill", "decode"):
        assert pods[role].containers[0]["image"].endswith("-cuda12")
    assert "cuda" not in pods["router"].containers[0]["image"]
