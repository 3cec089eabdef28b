"""Facts about a cluster that matter for Baton, and the rights that an install needs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kubernetes.utils.quantity import parse_quantity

GPU_RESOURCES = ("nvidia.com/gpu",)
# Devices that the images have no kernels for
OTHER_DEVICES = ("amd.com/gpu", "habana.ai/gaudi", "gpu.intel.com/i915", "gpu.intel.com/xe")
MIG_PREFIX = "nvidia.com/mig-"
PRODUCT_LABEL = "nvidia.com/gpu.product"
CLIQUE_LABEL = "nvidia.com/gpu.clique"
# The CUDA that a node's driver supports; the second one by older versions of GPU feature discovery
CUDA_LABELS = ("nvidia.com/cuda.runtime-version.major", "nvidia.com/cuda.runtime.major")
ZONE_LABEL = "topology.kubernetes.io/zone"
# Definitions of the operators that Baton's chart has objects for.
KUBERAY = "rayservices.ray.io"
GROUPS = ("leaderworkersets.leaderworkerset.x-k8s.io",)
GATEWAY = ("httproutes.gateway.networking.k8s.io", "grpcroutes.gateway.networking.k8s.io")
PROMETHEUS = ("servicemonitors.monitoring.coreos.com", "podmonitors.monitoring.coreos.com")
RULES = "prometheusrules.monitoring.coreos.com"
_RBAC = "rbac.authorization.k8s.io"
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
    def cuda(self) -> int | None:
        """The major version of CUDA that the driver supports; None where no label says it."""
        found = [self.labels[label] for label in CUDA_LABELS if self.labels.get(label, "").isdecimal()]
        return int(found[0]) if found else None

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
class Right:
    """An action of an install. `feature`: the values that need it, separated by ", "; empty: every install. Rights to
    objects without a namespace are asked for without one: an administrator of one namespace may create none of them."""

    group: str
    resource: str
    verb: str = "create"
    feature: str = ""
    has_namespace: bool = True

    @property
    def full_name(self) -> str:
        return f"{self.resource}.{self.group}" if self.group else self.resource

    @property
    def features(self) -> list[str]:
        return self.feature.split(", ")


@dataclass(frozen=True)
class Permission(Right):
    """A right, and whether the caller has it; None if the API does not say."""

    allowed: bool | None = None


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

    @property
    def cudas(self) -> list[int]:
        """Versions of CUDA that drivers support, sorted, of the nodes with GPUs whose labels say it."""
        return sorted({node.cuda for node in self.gpu_nodes if node.cuda is not None})

    def other_devices(self) -> list[str]:
        """Resources of usable nodes that the images cannot compute on."""
        nodes = [node for node in self.nodes if node.usable]
        return [name for name in OTHER_DEVICES if any(_count(node.allocatable, name) for node in nodes)]

    def may(self, *names: str) -> bool:
        """Whether no action on these objects (by full name) is known to be forbidden."""
        return not any(one.allowed is False and one.full_name in names for one in self.permissions)

    def may_have(self, feature: str) -> bool:
        """Whether no action that these values need is known to be forbidden."""
        return not any(one.allowed is False and feature in one.features for one in self.permissions)

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


def _of(names: tuple[str, ...], feature: str) -> tuple[Right, ...]:
    parts = (name.partition(".") for name in names)
    return tuple(Right(group, resource, feature=feature) for resource, _, group in parts)


RIGHTS = (
    Right("", "secrets"),
    Right("", "configmaps"),
    Right("", "services"),
    Right("", "serviceaccounts"),
    Right("apps", "deployments"),
    Right("apps", "statefulsets"),
    Right("batch", "jobs"),
    Right("networking.k8s.io", "networkpolicies"),
    Right("policy", "poddisruptionbudgets"),
    Right(_RBAC, "clusterroles", feature="topology.enabled", has_namespace=False),
    Right(_RBAC, "clusterrolebindings", feature="topology.enabled", has_namespace=False),
    # Kubernetes lets no one grant rights that they lack.
    Right("", "nodes", "get", feature="topology.enabled", has_namespace=False),
    Right(_RBAC, "roles", feature="peerExits.enabled, autoscaling.enabled"),
    Right(_RBAC, "rolebindings", feature="peerExits.enabled, autoscaling.enabled"),
    Right("", "pods", "get", feature="peerExits.enabled"),
    Right("", "pods", "list", feature="autoscaling.enabled"),
    Right("autoscaling", "horizontalpodautoscalers", feature="router.autoscaling.enabled"),
    *_of((KUBERAY,), "ray.mode kuberay"),
    *_of(GROUPS, "multiNode.by leaderWorkerSet"),
    *_of(GATEWAY, "routes of a Gateway"),
    *_of(PROMETHEUS, "observability.monitors.enabled"),
    *_of((RULES,), "observability.rules.enabled"),
    *_of(CERT_MANAGER, "tls.source certManager"),
)


@functools.cache
def amount(quantity: str) -> float:
    """Parse a quantity; an unreadable one counts as 0."""
    try:
        return float(parse_quantity(quantity))  # type: ignore[no-untyped-call]
    except ValueError:
        return 0.0
