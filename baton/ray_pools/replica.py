"""A Ray Serve replica, which supervises one whole worker (supervision/)."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

from baton.ray_pools.supervision import worker_sockets
from baton.ray_pools.supervision.exit_report import ExitReport
from baton.ray_pools.supervision.supervisor import HEAD_VARIABLE, WorkerSupervisor
from cluster.config import sources
from cluster.config.worker import WorkerConfig

log = logging.getLogger(__name__)


class Replica:
    """Supervises one worker, a process of its own: it outlives this replica and Ray's processes, and is taken over by
    the replica that Serve starts next."""

    def __init__(self, config: Mapping[str, Any], environment: Mapping[str, str], other_pool: Any = None):
        os.environ.update(environment)
        # Settings that differ between nodes (address, files of secrets) are in the node's environment.
        resolved = sources.load(WorkerConfig, {}, values=config)
        self._drain_seconds = resolved.drain_seconds
        head = os.environ[HEAD_VARIABLE] = _ray_address()
        if resolved.engine.nodes > 1:
            os.environ["RAY_ADDRESS"] = head  # the worker's own ranks are placed by the same Ray
        self._stopping = False
        report = ExitReport(resolved)
        self._supervisor = WorkerSupervisor.take_over_or_start(
            worker_sockets.directory(), config, environment, report.give
        )
        self._supervisor.wait_serving(resolved.load_seconds)
        threading.Thread(target=self._follow, name="follow", daemon=True).start()

    def _follow(self) -> None:
        """Serve restarts a replica whose process ends, as after a kill or `baton drain`. On a node that is going away it
        must not, so there the replica stays without a worker until the node has gone."""
        left, failed = self._supervisor.wait_ended()
        if self._supervisor.left_for_good or self._stopping:
            return
        log.error("the worker has ended: %s", left or failed or "killed")
        # A thread outside Ray has no gentler way to end the replica, and no work is left.
        os._exit(0 if left else 1)

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if not self._supervisor.healthy() and not self._supervisor.left_for_good:
            raise RuntimeError("the worker's engine has stopped or hangs, or its process is silent")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers for the policy, the same that the worker publishes in Redis."""
        numbers = self._supervisor.status().encode()
        return {name: float(number) for name, number in numbers.items() if not isinstance(number, str)}

    def __del__(self) -> None:
        if (supervisor := getattr(self, "_supervisor", None)) is not None:
            self._stopping = True
            supervisor.stop(self._drain_seconds + 5.0)


def _ray_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)
