"""What `baton doctor --values` prints is what the chart takes."""

from __future__ import annotations

from typing import Any

import pytest

from baton.doctor.checks import CERT_MANAGER, PROMETHEUS, RULES
from baton.doctor.facts import Facts, Node, Permission, Taint
from baton.doctor.values import values_for
from tests.system.helm.rendering import Renderer, ValueSet, pods_of
from tests.system.helm.value_sets import CERTS, KUBERAY

pytestmark = pytest.mark.system
H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "topology.kubernetes.io/zone": "a"}


def node(allocatable: dict[str, str], **more: Any) -> Node:
    return Node("one", **{"ready": True, "schedulable": True, "labels": {}, **more}, allocatable=allocatable)


GPU = node(
    {"nvidia.com/gpu": "8", "rdma/hca_shared_devices_a": "1000"},
    labels=H100,
    taints=[Taint("nvidia.com/gpu", "", "NoSchedule"), Taint("team", "ml", "NoSchedule")],
)
OPERATORS = {name: ["v1"] for name in (*CERT_MANAGER, *PROMETHEUS, RULES)}
CLUSTERS: dict[str, Facts] = {
    "bare": Facts("v1.32.0", "serving", [node({})]),
    "gpus": Facts("v1.32.0", "serving", [GPU]),
    "mig": Facts("v1.32.0", "serving", [node({"nvidia.com/mig-3g.40gb": "2"})]),
    "operators": Facts("v1.32.0", "serving", [GPU], OPERATORS),
    "kuberay": Facts("v1.32.0", "serving", [GPU], {**OPERATORS, "rayservices.ray.io": ["v1"]}),
    "few rights": Facts(
        "v1.32.0",
        "serving",
        [GPU],
        permissions=[Permission("create", "clusterroles", "rbac.authorization.k8s.io", False)],
    ),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_chart_renders_with_them(name: str, renderer: Renderer) -> None:
    facts = CLUSTERS[name]
    apis = (*(CERTS if CERT_MANAGER[0] in facts.crds else ()), *(KUBERAY if name == "kuberay" else ()))
    rendered = renderer.render(ValueSet(values=values_for(facts), apis=apis))
    assert rendered.code == 0, rendered.error
    workers = {pod.component: pod for pod in pods_of(rendered) if pod.component in ("prefill", "decode")}
    assert workers.keys() == {"prefill", "decode"}
    for pod in workers.values():
        limits = next(one for one in pod.spec["containers"] if one["name"] == "worker")["resources"]["limits"]
        assert pod.spec.get("nodeSelector", {}).items() <= H100.items()
        wanted = {key: count for key, count in limits.items() if "/" in key}
        # Only what a node of this cluster can give.
        assert all(int(count) <= int(facts.nodes[0].allocatable[key]) for key, count in wanted.items())
        assert bool(wanted) == bool(facts.gpu_nodes)
    kinds = {one["kind"] for one in rendered.manifests}
    assert ("Certificate" in kinds) == (CERT_MANAGER[0] in facts.crds)
    assert ("ServiceMonitor" in kinds) == (PROMETHEUS[0] in facts.crds)
    assert ("ClusterRole" in kinds) == bool(facts.gpu_nodes and name not in ("few rights", "mig"))
