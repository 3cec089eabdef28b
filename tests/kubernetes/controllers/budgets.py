"""Disruption budgets: how many of their pods may be evicted now."""

from __future__ import annotations

import math

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.selectors import selects
from tests.kubernetes.controllers import pods
from tests.kubernetes.controllers.base import Client


def part_of(value: int | str, whole: int, *, up: bool) -> int:
    """`25%` of a whole, rounded up or down; a number is itself."""
    if isinstance(value, int):
        return value
    share = int(value.removesuffix("%")) * whole / 100
    return math.ceil(share) if up else math.floor(share)


class Budgets:
    def __init__(self, client: Client):
        self._client = client

    def step(self) -> None:
        for budget in self._client.all("PodDisruptionBudget"):
            space = budget["metadata"]["namespace"]
            chosen = [
                pod
                for pod in self._client.all("Pod", space)
                if selects(budget["spec"].get("selector"), pod["metadata"].get("labels") or {})
                and not pods.is_over(pod)
            ]
            self._client.set_status(budget, _status(budget, chosen))


def _status(budget: Object, chosen: list[Object]) -> Object:
    spec = budget["spec"]
    expected = len([pod for pod in chosen if not pods.is_going(pod)])
    healthy = len([pod for pod in chosen if pods.is_ready(pod)])
    if "maxUnavailable" in spec:
        desired = max(0, expected - part_of(spec["maxUnavailable"], expected, up=True))
    else:
        desired = part_of(spec.get("minAvailable", 1), expected, up=True)
    allowed = max(0, healthy - desired)
    status = {
        "observedGeneration": budget["metadata"]["generation"],
        "expectedPods": expected,
        "currentHealthy": healthy,
        "desiredHealthy": desired,
        "disruptionsAllowed": allowed,
        "conditions": (budget.get("status") or {}).get("conditions") or [],
    }
    reason = "SufficientPods" if allowed else "InsufficientPods"
    return pods.with_condition(status, "DisruptionAllowed", allowed > 0, reason)
