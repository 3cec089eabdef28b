"""The kinds of objects that the API server serves: Kubernetes' own, and those of custom resource definitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]

STATUS = ("status",)
SCALABLE = ("status", "scale")
VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True)
class Kind:
    """A kind in one version; objects of other versions of it are not converted, only one version is served."""

    api_version: str
    name: str
    plural: str
    namespaced: bool = True
    subresources: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    schema: Object | None = field(default=None, compare=False, hash=False)
    scale_paths: tuple[str, str] = ("spec.replicas", "status.replicas")

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    @property
    def resource(self) -> str:
        """As messages name it: `deployments.apps`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


def _kinds() -> list[Kind]:
    return [
        Kind("v1", "Namespace", "namespaces", False, ("status", "finalize"), ("ns",)),
        Kind("v1", "Node", "nodes", False, STATUS, ("no",)),
        Kind("v1", "Pod", "pods", True, ("status", "log", "eviction", "binding"), ("po",)),
        Kind("v1", "Service", "services", True, STATUS, ("svc",)),
        Kind("v1", "Endpoints", "endpoints", True, (), ("ep",)),
        Kind("v1", "ConfigMap", "configmaps", True, (), ("cm",)),
        Kind("v1", "Secret", "secrets"),
        Kind("v1", "ServiceAccount", "serviceaccounts", True, ("token",), ("sa",)),
        Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims", True, STATUS, ("pvc",)),
        Kind("v1", "PersistentVolume", "persistentvolumes", False, STATUS, ("pv",)),
        Kind("v1", "Event", "events", True, (), ("ev",)),
        Kind("v1", "ResourceQuota", "resourcequotas", True, STATUS),
        Kind("v1", "LimitRange", "limitranges"),
        Kind("apps/v1", "Deployment", "deployments", True, SCALABLE, ("deploy",)),
        Kind("apps/v1", "ReplicaSet", "replicasets", True, SCALABLE, ("rs",)),
        Kind("apps/v1", "StatefulSet", "statefulsets", True, SCALABLE, ("sts",)),
        Kind("apps/v1", "DaemonSet", "daemonsets", True, STATUS, ("ds",)),
        Kind("apps/v1", "ControllerRevision", "controllerrevisions"),
        Kind("batch/v1", "Job", "jobs", True, STATUS),
        Kind("batch/v1", "CronJob", "cronjobs", True, STATUS, ("cj",)),
        Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", True, STATUS, ("hpa",)),
        Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", True, STATUS, ("pdb",)),
        Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies", True, (), ("netpol",)),
        Kind("networking.k8s.io/v1", "Ingress", "ingresses", True, STATUS, ("ing",)),
        Kind("rbac.authorization.k8s.io/v1", "Role", "roles"),
        Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
        Kind("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles", False),
        Kind("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "clusterrolebindings", False),
        Kind("authorization.k8s.io/v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", False),
        Kind("coordination.k8s.io/v1", "Lease", "leases"),
        Kind("storage.k8s.io/v1", "StorageClass", "storageclasses", False, (), ("sc",)),
        Kind("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", False, (), ("pc",)),
        Kind("node.k8s.io/v1", "RuntimeClass", "runtimeclasses", False),
        Kind("discovery.k8s.io/v1", "EndpointSlice", "endpointslices"),
        Kind(
            "apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", False, STATUS
        ),
    ]


def kinds_of_definition(definition: Object) -> list[Kind]:
    """The kinds that a CustomResourceDefinition adds, one for each served version."""
    spec = definition["spec"]
    found = []
    for version in spec["versions"]:
        subresources = version.get("subresources") or {}
        scale = subresources.get("scale") or {}
        found.append(
            Kind(
                f"{spec['group']}/{version['name']}",
                spec["names"]["kind"],
                spec["names"]["plural"],
                spec["scope"] == "Namespaced",
                tuple(name for name in ("status", "scale") if name in subresources),
                tuple(spec["names"].get("shortNames", ())),
                schema=version["schema"]["openAPIV3Schema"],
                scale_paths=(
                    scale.get("specReplicasPath", ".spec.replicas").lstrip("."),
                    scale.get("statusReplicasPath", ".status.replicas").lstrip("."),
                ),
            )
        )
    return found


class Kinds:
    """Looked up by what a path says (group, version, plural) or by what an object says (apiVersion, kind)."""

    def __init__(self) -> None:
        self._kinds = {(kind.api_version, kind.name): kind for kind in _kinds()}

    def __iter__(self) -> Any:
        return iter(list(self._kinds.values()))

    def add(self, kinds: list[Kind]) -> None:
        self._kinds |= {(kind.api_version, kind.name): kind for kind in kinds}

    def remove(self, kinds: list[Kind]) -> None:
        for kind in kinds:
            self._kinds.pop((kind.api_version, kind.name), None)

    def of_path(self, api_version: str, plural: str) -> Kind | None:
        matching = (k for k in self._kinds.values() if k.api_version == api_version and k.plural == plural)
        return next(matching, None)

    def of_object(self, api_version: str, name: str) -> Kind | None:
        return self._kinds.get((api_version, name))

    def named(self, name: str) -> Kind:
        """By its name alone (`Pod`), as tests give it. Raises KeyError."""
        for kind in self._kinds.values():
            if kind.name == name:
                return kind
        raise KeyError(name)
