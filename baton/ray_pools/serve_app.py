"""The pools as a Serve application that a configuration file names: for KubeRay, and for a Ray cluster that exists.

`import_path: baton.ray_pools.serve_app:build`; `args` holds a PoolDescription per role. The code must be on Ray's nodes.
To size the pools by load, `args.autoscaling` bounds them and the application's `autoscaling_policy` names
baton/ray_pools/policy_adapter.py with the same settings.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.ray_pools.application import Pool, application
from cluster.config import sources
from cluster.config.base import Frozen
from cluster.config.worker import Role, WorkerConfig
from cluster.errors import ConfigError

ROLES: tuple[Role, ...] = ("decode", "prefill")


class PoolDescription(Frozen):
    replicas: int = Field(ge=0)
    gpus: int = Field(0, ge=0, description="of one worker")
    resources: dict[str, float] = Field(default_factory=dict, description="further resources of Ray's naming")
    config: dict[str, Any] = Field(
        description="WorkerConfig, without secrets: those are in the nodes' environment"
    )


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
    wanted = {role: getattr(described, role) for role in ROLES}
    pools = {role: _pool(one) for role, one in wanted.items() if scaled or one.replicas}
    return application(pools, described.environment, described.autoscaling)


def _pool(described: PoolDescription) -> Pool:
    config = sources.load(WorkerConfig, {}, values=described.config)
    return Pool(config, described.config, described.replicas, described.gpus, described.resources)
