"""The chart's values that fit a cluster: only what differs from the chart's defaults, or follows from what is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.doctor.checks import CERT_MANAGER, KUBERAY, PROMETHEUS, RULES
from baton.doctor.facts import CLIQUE_LABEL, PRODUCT_LABEL, ZONE_LABEL, Facts, Node

Values = dict[str, Any]


def values_for(facts: Facts) -> Values:
    pool = _gpu_pool(facts) if facts.gpu_nodes else _cpu_pool()
    values: Values = {"prefill": dict(pool), "decode": dict(pool)}
    if not facts.gpu_nodes:
        values["model"] = {"dtype": "float32"}
    if "v1" in facts.crds.get(KUBERAY, ()):
        values["ray"] = {"mode": "kuberay"}
    if all(name in facts.crds for name in CERT_MANAGER):
        values["tls"] = {"enabled": True, "source": "certManager"}
    observability = {
        "monitors": all(name in facts.crds for name in PROMETHEUS),
        "rules": RULES in facts.crds,
    }
    if any(observability.values()):
        values["observability"] = {name: {"enabled": True} for name, there in observability.items() if there}
    if any(one.resource == "clusterroles" and one.allowed is False for one in facts.permissions):
        values["topology"] = {"enabled": False}  # reading a node's labels takes a cluster role
    elif not any(label in node.labels for node in facts.nodes for label in (ZONE_LABEL, CLIQUE_LABEL)):
        values["topology"] = {"enabled": False}  # there is nothing to read
    return values


def _cpu_pool() -> Values:
    return {"gpus": 0, "tensorParallel": 1}


def _gpu_pool(facts: Facts) -> Values:
    """One GPU a worker, on the kind of GPU there is most of: what the model needs is the user's to say."""
    (product, resource), _ = facts.gpu_kinds().most_common(1)[0]
    nodes = [node for node in facts.gpu_nodes if (node.gpu_product, node.gpu_resource) == (product, resource)]
    pool: Values = {"gpus": 1, "tensorParallel": 1, "gpuResource": resource}
    rdma = sorted(set.intersection(*(set(node.rdma) for node in nodes)))
    if rdma:
        pool["rdma"] = {"resourceName": rdma[0]}
    pod: Values = {}
    if product:
        pod["nodeSelector"] = {PRODUCT_LABEL: product}
    if tolerations := _tolerations(nodes):
        pod["tolerations"] = tolerations
    if pod:
        pool["pod"] = pod
    return pool


def _tolerations(nodes: Sequence[Node]) -> list[Values]:
    """Of the taints that keep pods off every one of these nodes."""
    common = set.intersection(
        *({taint for taint in node.taints if taint.effect in ("NoSchedule", "NoExecute")} for node in nodes)
    )
    return [
        {"key": taint.key, "operator": "Equal", "value": taint.value, "effect": taint.effect}
        if taint.value
        else {"key": taint.key, "operator": "Exists", "effect": taint.effect}
        for taint in sorted(common, key=lambda taint: (taint.key, taint.value, taint.effect))
    ]
