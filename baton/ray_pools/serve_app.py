"""The workers as one Ray Serve application: two deployments, each replica supervises a whole worker (supervision/).

Ray manages processes and nothing else: a worker opens its own gRPC port and registers itself, tokens and KV
never pass through Ray. Serve does not see the workers' ports, so a replica's ongoing requests are 0 to it.

For KubeRay, and for a Ray cluster that exists, a configuration file names it: `import_path:
baton.ray_pools.serve_app:build`; `args` holds a PoolDescription per role. The code must be on Ray's nodes. To size the
pools by load, `args.autoscaling` bounds them and the application's `autoscaling_policy` names
baton/ray_pools/policy_adapter.py with the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.ray_pools.policy_adapter import deployment_name
from baton.ray_pools.replica import Replica
from cluster.config import sources
from cluster.config.base import Frozen
from cluster.config.worker import Role, WorkerConfig
from cluster.errors import ConfigError

# Serve needs one deployment at the root, so the later pool is bound to the earlier one, which only keeps its handle.
ROLES: tuple[Role, ...] = ("decode", "prefill")
# Baton fences a worker at 5 s; Serve restarts it later, so a fenced worker may rejoin until then.
HEALTH_CHECK_PERIOD_SECONDS = 10.0
HEALTH_CHECK_TIMEOUT_SECONDS = 30.0


class PoolDescription(Frozen):
    """Identical workers, and the resources that Ray must find for each."""

    replicas: int = Field(ge=0)
    gpus: int = Field(0, ge=0, description="of one worker")
    resources: dict[str, float] = Field(default_factory=dict, description="further resources of Ray's naming")
    config: dict[str, Any] = Field(
        description="WorkerConfig, without secrets: those are in files, or in the nodes' environment"
    )

    def worker(self) -> WorkerConfig:
        """Raises ConfigError."""
        return sources.load(WorkerConfig, {}, values=self.config)


class AppArguments(Frozen):
    prefill: PoolDescription
    decode: PoolDescription
    environment: dict[str, str] = Field(default_factory=dict, description="of every worker")
    autoscaling: ServeAutoscalingConfig | None = None


def build(arguments: dict[str, Any]) -> Any:
    """Serve's application builder. Raises ConfigError naming the field."""
    try:
        described = AppArguments.model_validate(arguments)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{where}: {first['msg']}", field=where) from None
    scaled = described.autoscaling is not None
    wanted: dict[Role, PoolDescription] = {role: getattr(described, role) for role in ROLES}
    pools = {role: pool for role, pool in wanted.items() if scaled or pool.replicas}
    return application(pools, described.environment, described.autoscaling)


def application(
    pools: Mapping[Role, PoolDescription],
    environment: Mapping[str, str],
    autoscaling: ServeAutoscalingConfig | None = None,
) -> Any:
    """Return both pools as one Serve application, so that one policy can scale both.

    Ray stores bound arguments and shows them to readers of its state, so they hold no secret. Raises ConfigError.
    """
    bound: Any = None
    for role, pool in pools.items():
        bound = _deployment(role, pool, autoscaling).bind(pool.config, dict(environment), bound)
    return bound


def _deployment(role: Role, pool: PoolDescription, autoscaling: ServeAutoscalingConfig | None) -> Any:
    from ray import serve

    worker = pool.worker()
    return serve.deployment(
        Replica,
        name=deployment_name(role),
        **_size(role, pool.replicas, autoscaling),
        ray_actor_options={
            "num_cpus": worker.engine.tensor_parallel // worker.engine.nodes,  # the leader's node
            "num_gpus": pool.gpus,
            "resources": pool.resources,
        },
        graceful_shutdown_timeout_s=worker.drain_seconds + 10.0,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=HEALTH_CHECK_PERIOD_SECONDS,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_SECONDS,
        max_ongoing_requests=100,
    )


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
