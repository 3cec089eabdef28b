"""The workers as one Ray Serve application: two deployments, each replica supervises a whole worker (supervision/).

Ray manages processes and nothing else: a worker opens its own gRPC port and registers itself, tokens and KV
never pass through Ray. Serve does not see the workers' ports, so a replica's ongoing requests are 0 to it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.ray_pools import scaled_application
from baton.ray_pools.policy_adapter import deployment_name
from baton.ray_pools.supervision import worker_sockets
from baton.ray_pools.supervision.exit_report import ExitReport
from baton.ray_pools.supervision.supervisor import WorkerSupervisor
from cluster.config import sources
from cluster.config.worker import Role, WorkerConfig

log = logging.getLogger(__name__)
# Baton fences a worker at 5 s; Serve restarts it later, so a fenced worker may rejoin until then.
HEALTH_CHECK_PERIOD_SECONDS = 10.0
HEALTH_CHECK_TIMEOUT_SECONDS = 30.0
APPLICATION = "baton"


class Replica:
    """Keeps one worker, which is a process of its own: it outlives this one and Ray's others, and is taken over
    by the replica that Serve starts in this one's place."""

    def __init__(self, config: Mapping[str, Any], environment: Mapping[str, str], other_pool: Any = None):
        os.environ.update(environment)
        # What differs from node to node (its address, its secrets' files) stands in that node's environment.
        resolved = sources.load(WorkerConfig, {}, values=config)
        self._drain_seconds = resolved.drain_seconds
        if resolved.engine.nodes > 1:
            os.environ["RAY_ADDRESS"] = _ray_address()  # the worker's own ranks are placed by the same Ray
        self._stopping = False
        word = ExitReport(resolved)
        self._keeper = WorkerSupervisor.take_over_or_start(
            worker_sockets.directory(), config, environment, word.give
        )
        self._keeper.wait_serving(resolved.load_seconds)
        threading.Thread(target=self._follow, name="follow", daemon=True).start()

    def _follow(self) -> None:
        """Serve starts a replica whose process ends again at once: one that was killed, or drained by `baton drain`. On
        a node that goes away it must not, so there the replica stays, without a worker, until the node is gone."""
        left, failed = self._keeper.wait_ended()
        if self._keeper.left_for_good or self._stopping:
            return
        log.error("the worker has ended: %s", left or failed or "killed")
        # From a thread that is not Ray's there is no gentler way, and nothing is left to lose.
        os._exit(0 if left else 1)

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if not self._keeper.healthy() and not self._keeper.left_for_good:
            raise RuntimeError("the worker's engine has stopped or hangs, or its process is silent")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the policy reads: the numbers that this worker publishes in Redis too."""
        return {name: float(n) for name, n in self._keeper.status().items() if isinstance(n, int | float)}

    def __del__(self) -> None:
        if (supervisor := getattr(self, "_keeper", None)) is not None:
            self._stopping = True
            supervisor.stop(self._drain_seconds + 5.0)


def _ray_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


@dataclass(frozen=True)
class Pool:
    """Equal workers, and what Ray has to find for each."""

    config: WorkerConfig
    given: Mapping[
        str, Any
    ]  # the same as its deployer was given it: secrets are in files, or in the nodes' environment
    replicas: int
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)  # of Ray's own naming


def deploy(
    pools: Mapping[Role, Pool],
    environment: Mapping[str, str],
    autoscaling: ServeAutoscalingConfig | None = None,
) -> None:
    """Deploys the pools on the Ray cluster this process is connected to; returns when they run.

    With `autoscaling` the pools begin as large as `pools` says and one policy sizes both.
    Raises RuntimeError if a replica cannot start, SetupError if they do not run in time.
    """
    from ray import serve

    serve.start(proxy_location="Disabled")
    if autoscaling is None:
        serve.run(application(pools, environment), name=APPLICATION, route_prefix=None)
    else:
        scaled_application.deploy(APPLICATION, pools, environment, autoscaling)


def application(
    pools: Mapping[Role, Pool],
    environment: Mapping[str, str],
    autoscaling: ServeAutoscalingConfig | None = None,
) -> Any:
    """One Serve application, so that one policy can scale both pools. Serve wants one deployment at its root: the
    later pool is bound to the earlier one, which only keeps its handle.

    Ray keeps what is bound, and shows it to whoever reads its state: so no secret is in it.
    """
    bound: Any = None
    for role, pool in pools.items():
        bound = _deployment(role, pool, autoscaling).bind(dict(pool.given), dict(environment), bound)
    return bound


def _size(role: Role, replicas: int, autoscaling: ServeAutoscalingConfig | None) -> dict[str, Any]:
    if autoscaling is None:
        return {"num_replicas": replicas}
    limits = autoscaling.pool(role)
    return {
        "autoscaling_config": {
            "min_replicas": limits.min_replicas,
            "max_replicas": limits.max_replicas,
            "initial_replicas": min(max(replicas, limits.min_replicas), limits.max_replicas),
            # Pauses are the policy's own. Serve records numbers five times within this period.
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "look_back_period_s": max(1.0, autoscaling.interval_seconds),
        }
    }


def _deployment(role: Role, pool: Pool, autoscaling: ServeAutoscalingConfig | None) -> Any:
    from ray import serve

    return serve.deployment(
        Replica,
        name=deployment_name(role),
        **_size(role, pool.replicas, autoscaling),
        ray_actor_options={
            "num_cpus": pool.config.engine.tensor_parallel,
            "num_gpus": pool.gpus,
            "resources": dict(pool.resources),
        },
        graceful_shutdown_timeout_s=pool.config.drain_seconds + 10.0,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=HEALTH_CHECK_PERIOD_SECONDS,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_SECONDS,
        max_ongoing_requests=100,
    )


def shutdown() -> None:
    from ray import serve

    serve.shutdown()  # type: ignore[no-untyped-call]
