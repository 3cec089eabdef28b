"""Facts about a cluster that matter for Baton."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.doctor.quantity import amount

GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
MIG_PREFIX = "nvidia.com/mig-"
PRODUCT_LABEL = "nvidia.com/gpu.product"
CLIQUE_LABEL = "nvidia.com/gpu.clique"
ZONE_LABEL = "topology.kubernetes.io/zone"
# Definitions of the operators that Baton's chart has objects for.
KUBERAY = "rayservices.ray.io"
PROMETHEUS = ("servicemonitors.monitoring.coreos.com", "podmonitors.monitoring.coreos.com")
RULES = "prometheusrules.monitoring.coreos.com"
CERT_MANAGER = ("certificates.cert-manager.io", "issuers.cert-manager.io")


@dataclass(frozen=True)
class Taint:
    key: str
    value: str
    effect: str


@dataclass(frozen=True)
class Node:
    name: str
    ready: bool
    schedulable: bool
    allocatable: Mapping[str, str]
    labels: Mapping[str, str]
    taints: Sequence[Taint] = ()

    @property
    def usable(self) -> bool:
        return self.ready and self.schedulable

    def amount(self, resource: str) -> float:
        """Allocatable amount in cores, bytes or devices."""
        return amount(self.allocatable.get(resource, "0"))

    @property
    def gpu_resource(self) -> str:
        """The GPU resource that a worker here would request; empty without GPUs."""
        whole = [name for name in GPU_RESOURCES if _count(self.allocatable, name)]
        parts = sorted(
            name
            for name in self.allocatable
            if name.startswith(MIG_PREFIX) and _count(self.allocatable, name)
        )
        return (whole + parts + [""])[0]

    @property
    def gpus(self) -> int:
        return _count(self.allocatable, self.gpu_resource)

    @property
    def gpu_product(self) -> str:
        return self.labels.get(PRODUCT_LABEL, "") if self.gpus else ""

    @property
    def rdma(self) -> Mapping[str, int]:
        """RDMA resources, recognised by name: device plugins choose their names, but include what they are."""
        names = (name for name in self.allocatable if _is_rdma(name))
        return {
            name: _count(self.allocatable, name) for name in sorted(names) if _count(self.allocatable, name)
        }


@dataclass(frozen=True)
class StorageClass:
    name: str
    is_default: bool


@dataclass(frozen=True)
class Permission:
    """An action of an install, and whether the caller may do it; None if the API does not say. `feature`: the values that
    need it; empty: every install."""

    verb: str
    resource: str
    group: str
    allowed: bool | None
    feature: str = ""

    @property
    def full_name(self) -> str:
        return f"{self.resource}.{self.group}" if self.group else self.resource


@dataclass(frozen=True)
class Facts:
    """`unread`: what could not be read, with the reason; it is unknown, not missing."""

    version: str
    namespace: str
    nodes: Sequence[Node] = ()
    crds: Mapping[str, Sequence[str]] = field(default_factory=dict)  # full name → served versions
    storage_classes: Sequence[StorageClass] = ()
    permissions: Sequence[Permission] = ()
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def gpu_nodes(self) -> list[Node]:
        return [node for node in self.nodes if node.usable and node.gpus]

    def may(self, *names: str) -> bool:
        """Whether no action on these objects (by full name) is known to be forbidden."""
        return not any(one.allowed is False and one.full_name in names for one in self.permissions)

    def gpu_kinds(self) -> Counter[tuple[str, str]]:
        """Count GPUs of usable nodes by (product, resource)."""
        kinds: Counter[tuple[str, str]] = Counter()
        for node in self.gpu_nodes:
            kinds[node.gpu_product, node.gpu_resource] += node.gpus
        return kinds


def _count(allocatable: Mapping[str, str], name: str) -> int:
    """Extended resources are whole numbers, but a thousand of one is `1k`."""
    return int(amount(allocatable.get(name, "0")))


def _is_rdma(name: str) -> bool:
    domain, _, resource = name.partition("/")
    return domain == "rdma" or domain.startswith("rdma.") or "rdma" in resource or resource.startswith("efa")
