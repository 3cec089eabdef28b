"""Rights that installing the chart needs, always and for features that its values enable."""

from __future__ import annotations

from dataclasses import dataclass

from baton.doctor.facts import CERT_MANAGER, KUBERAY, PROMETHEUS, RULES

_RBAC = "rbac.authorization.k8s.io"


@dataclass(frozen=True)
class Right:
    """`feature`: the values that need it; empty: every install. Rights to objects without a namespace are asked for
    without one: an administrator of one namespace may create none of them."""

    group: str
    resource: str
    verb: str = "create"
    feature: str = ""
    has_namespace: bool = True


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
    Right(_RBAC, "roles", feature="autoscaling.enabled"),
    Right(_RBAC, "rolebindings", feature="autoscaling.enabled"),
    Right("autoscaling", "horizontalpodautoscalers", feature="router.autoscaling.enabled"),
    *_of((KUBERAY,), "ray.mode kuberay"),
    *_of(PROMETHEUS, "observability.monitors.enabled"),
    *_of((RULES,), "observability.rules.enabled"),
    *_of(CERT_MANAGER, "tls.source certManager"),
)
