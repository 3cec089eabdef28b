"""Values of the chart that fit a cluster: those that differ from the defaults or follow from the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.doctor.facts import (
    CERT_MANAGER,
    CLIQUE_LABEL,
    PRODUCT_LABEL,
    PROMETHEUS,
    RULES,
    ZONE_LABEL,
    Facts,
    Node,
)
from baton.doctor.pods import Values, blocking, pods_of, without_room

# The CUDA of images with the chart's own suffix, and the suffix of those for older drivers (deploy/docker)
CUDA = 13
OLDER_CUDA, OLDER_SUFFIX = 12, "-cuda12"


@dataclass(frozen=True)
class _Size:
    """Requests of a worker. Its memory limit is twice the request; without GPUs equal, because the KV pool fills it."""

    cpu: str
    gib: int
    routers: int | None = None


_DEFAULT = _Size("4", 32)  # the chart's default
_SIZES = (_DEFAULT, _Size("4", 16), _Size("2", 8), _Size("1", 4))
_SMALL_SIZES = (_Size("1", 2), _Size("500m", 2, routers=1))  # for small models on CPUs


def values_for(facts: Facts) -> Values:
    """Return the first plan that fits the nodes, with workers as large as possible; if none fits, the first one, and
    checks.py reports it."""
    operators = _operators(facts)
    sizes = _SIZES if facts.gpu_nodes else (*_SIZES, *_SMALL_SIZES)
    plans = [
        {**_sized(plan, size), **operators}
        for plan in (_gpu_plans(facts) if facts.gpu_nodes else [_cpu_plan()])
        for size in sizes
    ]
    fitting = (plan for plan in plans if not without_room(pods_of(plan), facts.nodes))
    return next(fitting, plans[0])


def _operators(facts: Facts) -> Values:
    """Values for drivers, installed operators and readable objects. None for Ray's: each worker of these plans has one
    pod, and such workers need no Ray, whether an operator for it is there or not."""
    values: Values = {}
    if any(OLDER_CUDA <= one < CUDA for one in facts.cudas):
        values["image"] = {"gpuSuffix": OLDER_SUFFIX}
    if _usable(facts, *CERT_MANAGER):
        values["tls"] = {"enabled": True, "source": "certManager"}
    observability = {"monitors": _usable(facts, *PROMETHEUS), "rules": _usable(facts, RULES)}
    if any(observability.values()):
        values["observability"] = {name: {"enabled": True} for name, there in observability.items() if there}
    # Reading labels of nodes needs a cluster role, and there may be no labels.
    labelled = any(label in node.labels for node in facts.nodes for label in (ZONE_LABEL, CLIQUE_LABEL))
    if not labelled or not facts.may_have("topology.enabled"):
        values["topology"] = {"enabled": False}
    if not facts.may_have("peerExits.enabled"):
        values["peerExits"] = {"enabled": False}
    return values


def _usable(facts: Facts, *definitions: str) -> bool:
    return all(name in facts.crds for name in definitions) and facts.may(*definitions)


def _sized(plan: Values, size: _Size) -> Values:
    values = {**plan}
    for role in ("prefill", "decode"):
        more: Values = {}
        limit = 2 * size.gib if plan[role]["gpus"] else size.gib
        if size != _DEFAULT or not plan[role]["gpus"]:
            more["resources"] = {
                "requests": {"cpu": size.cpu, "memory": f"{size.gib}Gi"},
                "limits": {"memory": f"{limit}Gi"},
            }
        if size != _DEFAULT:
            more["shmSize"] = f"{min(8, max(1, size.gib // 2))}Gi"
        values[role] = {**plan[role], **more}
    if size.gib <= 4:
        values["transfer"] = {"ringBytes": 64 * 2**20, "ringMaxBytes": 128 * 2**20}
    if size.routers:
        values["router"] = {"replicas": size.routers}
    return values


def _cpu_plan() -> Values:
    pool = {"gpus": 0, "tensorParallel": 1}
    return {"prefill": pool, "decode": pool, "model": {"dtype": "float32"}}


def _gpu_plans(facts: Facts) -> Iterator[Values]:
    """One GPU per worker of the most frequent kind, because the model's needs are unknown; or a kind per pool; or, with a
    single GPU, a decode worker that prefills itself."""
    kinds = [kind for kind, _ in facts.gpu_kinds().most_common()]
    pools = [_gpu_pool(facts, *kind) for kind in kinds[:2]]
    yield {"prefill": pools[0], "decode": pools[0]}
    if len(pools) > 1:
        yield {"prefill": pools[1], "decode": pools[0]}
    yield {"prefill": {"replicas": 0, **pools[0]}, "decode": pools[0]}


def _gpu_pool(facts: Facts, product: str, resource: str) -> Values:
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
    """Return tolerations of the taints that all of these nodes have."""
    common = set.intersection(*(blocking(node.taints) for node in nodes))
    return [
        {"key": taint.key, "operator": "Equal", "value": taint.value, "effect": taint.effect}
        if taint.value
        else {"key": taint.key, "operator": "Exists", "effect": taint.effect}
        for taint in sorted(common, key=lambda taint: (taint.key, taint.value, taint.effect))
    ]
