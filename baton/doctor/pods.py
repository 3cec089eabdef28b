"""The pods of an install with given values, and whether nodes have room for them.

The amounts are the chart's defaults; a test compares them with what the chart renders. Nodes count with their
allocatable amounts; running pods are not considered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.doctor.facts import Node, Taint, amount

_GIB = 2.0**30
Values = dict[str, Any]
Amounts = Mapping[str, float]  # cores, bytes, devices

ROUTERS = 2
WORKER = {"cpu": "4", "memory": "32Gi"}
GPU_RESOURCE = "nvidia.com/gpu"
_ROUTER = {"cpu": "1", "memory": "1Gi"}
_REDIS = {"cpu": "250m", "memory": "256Mi"}


@dataclass(frozen=True)
class PodNeed:
    name: str
    amounts: Amounts
    node_labels: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, str]] = ()

    @property
    def devices(self) -> float:
        return sum(count for name, count in self.amounts.items() if "/" in name)


def _numbers(quantities: Mapping[str, str]) -> dict[str, float]:
    return {name: amount(quantity) for name, quantity in quantities.items()}


def pods_of(values: Values) -> list[PodNeed]:
    """The pods of values that values.py makes: workers of one pod each, and no Ray."""
    routers = values.get("router", {}).get("replicas", ROUTERS)
    pods = [PodNeed("router", _numbers(_ROUTER))] * routers
    pods += [PodNeed("redis", _numbers(_REDIS))]
    for role in ("prefill", "decode"):
        pods += [_worker(role, values[role])] * values[role].get("replicas", 1)
    return pods


def _worker(role: str, pool: Values) -> PodNeed:
    amounts = _numbers(pool.get("resources", {}).get("requests", WORKER))
    if pool["gpus"]:
        amounts[pool.get("gpuResource", GPU_RESOURCE)] = pool["gpus"]
    if "rdma" in pool:
        amounts[pool["rdma"]["resourceName"]] = 1.0
    pod = pool.get("pod", {})
    return PodNeed(role, amounts, pod.get("nodeSelector", {}), pod.get("tolerations", ()))


def without_room(pods: Iterable[PodNeed], nodes: Iterable[Node]) -> list[PodNeed]:
    """Return the pods that fit nowhere after placing the others: largest first, each on the first node that fits, on one
    with GPUs only if no other does."""
    free = [
        (node, {name: node.amount(name) for name in node.allocatable})
        for node in sorted(nodes, key=lambda node: node.gpus)
        if node.usable
    ]
    left = []
    for pod in sorted(pods, key=_size, reverse=True):
        for node, amounts in free:
            if _admits(node, pod) and _has(amounts, pod):
                for name, count in {**pod.amounts, "pods": 1.0}.items():
                    amounts[name] -= count
                break
        else:
            left.append(pod)
    return left


def shown(pods: Sequence[PodNeed]) -> str:
    """Describe their total requests, e.g. `6 pods with 11.7 CPUs, 68.8 GiB, 2 × nvidia.com/gpu`."""
    sums: defaultdict[str, float] = defaultdict(float)
    for pod in pods:
        for name, count in pod.amounts.items():
            sums[name] += count
    parts = [f"{sums['cpu']:.4g} CPUs", f"{sums['memory'] / _GIB:.4g} GiB"]
    parts += [f"{sums[name]:g} × {name}" for name in sorted(sums) if "/" in name]
    return f"{len(pods)} pod{'s' if len(pods) != 1 else ''} with {', '.join(parts)}"


def blocking(taints: Iterable[Taint]) -> set[Taint]:
    """Return the taints that keep off pods without a toleration."""
    return {taint for taint in taints if taint.effect in ("NoSchedule", "NoExecute")}


def _size(pod: PodNeed) -> tuple[float, float, float]:
    return (pod.devices, pod.amounts.get("memory", 0.0), pod.amounts.get("cpu", 0.0))


def _has(free: Mapping[str, float], pod: PodNeed) -> bool:
    return all(free.get(name, 0.0) >= count for name, count in {**pod.amounts, "pods": 1.0}.items())


def _admits(node: Node, pod: PodNeed) -> bool:
    return pod.node_labels.items() <= node.labels.items() and all(
        any(_tolerates(one, taint) for one in pod.tolerations) for taint in blocking(node.taints)
    )


def _tolerates(toleration: Mapping[str, str], taint: Taint) -> bool:
    return (
        toleration["key"] == taint.key
        and toleration["effect"] == taint.effect
        and (toleration["operator"] == "Exists" or toleration.get("value", "") == taint.value)
    )
