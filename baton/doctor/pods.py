"""The pods of an install with given values, and their requests.

The amounts are the chart's defaults; a test compares them with what the chart renders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.doctor.quantity import amount

Values = dict[str, Any]
Amounts = Mapping[str, float]  # cores, bytes, devices

ROUTERS = 2
WORKER = {"cpu": "4", "memory": "32Gi"}
GPU_RESOURCE = "nvidia.com/gpu"
_ROUTER = {"cpu": "1", "memory": "1Gi"}
_REDIS = {"cpu": "250m", "memory": "256Mi"}
_RAY_HEAD = {"cpu": "1", "memory": "2Gi"}
_RAY_NODE = {"cpu": "200m", "memory": "768Mi"}  # beside each worker, where Ray is embedded


@dataclass(frozen=True)
class PodNeed:
    name: str
    amounts: Amounts
    node_labels: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, str]] = ()

    @property
    def devices(self) -> float:
        return sum(count for name, count in self.amounts.items() if "/" in name)


def total(*parts: Mapping[str, str]) -> dict[str, float]:
    return {name: sum(amount(part.get(name, "0")) for part in parts) for part in parts for name in part}


def pods_of(values: Values) -> list[PodNeed]:
    routers = values.get("router", {}).get("replicas", ROUTERS)
    pods = [PodNeed("router", total(_ROUTER))] * routers
    pods += [PodNeed("redis", total(_REDIS)), PodNeed("ray-head", total(_RAY_HEAD))]
    is_embedded = values.get("ray", {}).get("mode", "embedded") == "embedded"
    for role in ("prefill", "decode"):
        pods += [_worker(role, values[role], is_embedded)] * values[role].get("replicas", 1)
    return pods


def _worker(role: str, pool: Values, has_ray_node: bool) -> PodNeed:
    requests = pool.get("resources", {}).get("requests", WORKER)
    amounts = total(requests, _RAY_NODE) if has_ray_node else total(requests)
    if pool["gpus"]:
        amounts[pool.get("gpuResource", GPU_RESOURCE)] = pool["gpus"]
    if "rdma" in pool:
        amounts[pool["rdma"]["resourceName"]] = 1.0
    pod = pool.get("pod", {})
    return PodNeed(role, amounts, pod.get("nodeSelector", {}), pod.get("tolerations", ()))
