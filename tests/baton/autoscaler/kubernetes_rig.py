"""An autoscaler before a Kubernetes API of the test, and pods as that API describes them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from baton.autoscaler.autoscaler import Autoscaler
from baton.autoscaler.config import AutoscalingConfig, PoolLimits
from baton.autoscaler.decision import Decision
from baton.autoscaler.platforms.kubernetes import StatefulSets, connect
from cluster.config.worker import Role
from tests.baton.autoscaler.registered import RegisteredWorker, decode_status, prefill_status
from tests.kubernetes.api.server import ApiServer
from tests.kubernetes.samples import pod

NAMES: dict[Role, str] = {"prefill": "b-prefill", "decode": "b-decode"}
POOL = PoolLimits(max_replicas=6, startup_seconds=30)
CONFIG = AutoscalingConfig(prefill=POOL, decode=POOL, gpu_budget=10, ttft_objective_seconds=5.0)
RUNS = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


class Rig:
    """An autoscaler with a clock of its own, and one worker of each role."""

    def __init__(self, server: ApiServer, redis_url: str, namespace: str, path: Path):
        self.server = server
        self.now = 1000.0
        self.platform = StatefulSets(connect(server.kubeconfig(path)), "default", NAMES)
        self.registry = CollectorRegistry()
        self.scaler = Autoscaler(
            CONFIG, redis_url, namespace, self.platform, self.registry, clock=lambda: self.now
        )
        self.prefill = RegisteredWorker(redis_url, namespace, "prefill", "p0")
        self.decode = RegisteredWorker(redis_url, namespace, "decode", "d0")

    def step(self, requests_per_second: float = 0.05, batch: float = 4.0) -> Decision | None:
        self.now += CONFIG.interval_seconds
        self.prefill.publish(**prefill_status(self.now - 1000.0, requests_per_second))
        self.decode.publish(**decode_status(self.now - 1000.0, batch))
        return self.scaler.step()

    def replicas(self, role: Role) -> int:
        return int(self.server.object("StatefulSet", NAMES[role])["spec"]["replicas"])

    def set_by_hand(self, role: Role, replicas: int) -> None:
        document = copy.deepcopy(self.server.object("StatefulSet", NAMES[role]))
        document["spec"]["replicas"] = replicas
        self.server.update(document)

    def metric(self, name: str, **labels: str) -> float:
        value: float | None = self.registry.get_sample_value(f"baton_autoscaling_{name}", labels)
        assert value is not None, name
        return value

    def close(self) -> None:
        self.prefill.registration.stop()
        self.decode.registration.stop()
        self.scaler.leadership.close()
        self.platform.close()


def starting_pod(name: str, **changes: Any) -> dict[str, Any]:
    """Scheduled, and its containers run; what they do is not over yet."""
    made: dict[str, Any] = unschedulable_pod(name)
    conditions = {"PodScheduled": "True", "Ready": "False"}
    status: dict[str, Any] = {"phase": "Running", "containerStatuses": [("worker", RUNS, 0)]}
    for key, value in changes.items():
        (conditions if key in conditions else status)[key] = value
    for kind in ("initContainerStatuses", "containerStatuses"):
        status[kind] = [
            {
                "name": container,
                "state": state,
                "restartCount": restarts,
                "ready": False,
                "image": "",
                "imageID": "",
            }
            for container, state, restarts in status.get(kind, ())
        ]
    listed = [{"type": key, "status": value} for key, value in conditions.items()]
    return {**made, "status": {**status, "conditions": listed}}


def unschedulable_pod(name: str) -> dict[str, object]:
    made = pod(name, labels={"app": "b-prefill"})
    owner = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "name": "b-prefill",
        "uid": "u",
        "controller": True,
    }
    made["metadata"]["ownerReferences"] = [owner]
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    made["status"] = {"phase": "Pending", "conditions": [condition]}
    return made
