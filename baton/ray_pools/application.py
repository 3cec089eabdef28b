"""The workers as one Ray Serve application: two deployments, each replica supervises a whole worker (supervision/).

Ray manages processes and nothing else: a worker opens its own gRPC port and registers itself, tokens and KV
never pass through Ray. Serve does not see the workers' ports, so a replica's ongoing requests are 0 to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.ray_pools.policy_adapter import deployment_name
from baton.ray_pools.replica import Replica
from cluster.config.worker import Role, WorkerConfig

# Baton fences a worker at 5 s; Serve restarts it later, so a fenced worker may rejoin until then.
HEALTH_CHECK_PERIOD_SECONDS = 10.0
HEALTH_CHECK_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class Pool:
    """Identical workers, and the resources that Ray must find for each."""

    config: WorkerConfig
    given: Mapping[
        str, Any
    ]  # the same as its deployer was given it: secrets are in files, or in the nodes' environment
    replicas: int
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)  # by Ray's names


def application(
    pools: Mapping[Role, Pool],
    environment: Mapping[str, str],
    autoscaling: ServeAutoscalingConfig | None = None,
) -> Any:
    """One Serve application, so that one policy can scale both pools. Serve needs one deployment at the root, so the
    later pool is bound to the earlier one, which only keeps its handle.

    Ray stores bound arguments and shows them to readers of its state, so they hold no secret.
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
            # The policy has its own pauses. Serve records numbers five times per period.
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
