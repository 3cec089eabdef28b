"""Nodes and resources of clusters that `baton doctor` looks at."""

from __future__ import annotations

from typing import Any

from tests.kubernetes.api.server import ApiServer

DRIVER = {"nvidia.com/cuda.runtime-version.major": "13"}
H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "topology.kubernetes.io/zone": "a", **DRIVER}
L4 = {"nvidia.com/gpu.product": "NVIDIA-L4", **DRIVER}
LARGE = {"cpu": "96", "memory": "1Ti", "pods": "250"}
EIGHT_RDMA = {**LARGE, "nvidia.com/gpu": "8", "rdma/hca_shared_devices_a": "1k"}


def crd(plural: str, group: str, version: str = "v1") -> dict[str, Any]:
    kind = plural.rstrip("s").capitalize()
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {
                        "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                    },
                }
            ],
        },
    }


def equip(server: ApiServer) -> None:
    """A GPU cluster with everything that Baton can use."""
    server.add_node("gpu-0", H100, EIGHT_RDMA)
    server.add_node("gpu-1", H100, EIGHT_RDMA)
    server.add_node("small", L4, {"nvidia.com/gpu": "1"})
    server.add_node("cpu")
    server.create(crd("rayservices", "ray.io"))
    for plural in ("servicemonitors", "podmonitors", "prometheusrules"):
        server.create(crd(plural, "monitoring.coreos.com"))
    for plural in ("certificates", "issuers"):
        server.create(crd(plural, "cert-manager.io"))
    server.create(crd("leaderworkersets", "leaderworkerset.x-k8s.io"))
    for plural in ("httproutes", "grpcroutes"):
        server.create(crd(plural, "gateway.networking.k8s.io"))
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    server.create(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": "fast", "annotations": default},
            "provisioner": "example.com/disk",
        }
    )
