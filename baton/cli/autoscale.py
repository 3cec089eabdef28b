"""`baton autoscale`: sizes both pools of an embedded deployment on Kubernetes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any, Self

from prometheus_client import CollectorRegistry
from pydantic import Field, ValidationError, model_validator

from baton.autoscaler.config import AutoscalingConfig, PoolLimits
from baton.cli.flags import Flags
from baton.cli.output import tell
from baton.cli.serve import ConfigFile, ReadyFile, report_redis, write_ready
from cluster.config import sources
from cluster.config.base import Frozen, no_flag
from cluster.config.shared import ClusterFields
from cluster.config.worker import ROLES, Role
from cluster.errors import ConfigError
from cluster.telemetry import logs
from cluster.telemetry.exposition import MetricsServer


class StatefulSetNames(Frozen):
    panel = "Kubernetes"

    prefill: str = Field("baton-prefill", description="StatefulSet of the prefill workers")
    decode: str = Field("baton-decode", description="StatefulSet of the decode workers")


class ModelPools(Frozen):
    """The pools of a model beside the first one; what is not here is as for that."""

    panel = "Models"

    name: str = Field(min_length=1, max_length=256, description="name that its workers register")
    stateful_sets: StatefulSetNames
    prefill: PoolLimits = PoolLimits()
    decode: PoolLimits = PoolLimits()
    ttft_objective_seconds: float | None = Field(None, gt=0, description="default: the first one's")
    itl_objective_seconds: float | None = Field(None, gt=0, description="default: the first one's")


class AutoscaleConfig(AutoscalingConfig, ClusterFields):
    """The policy, the cluster whose load it reads, and the StatefulSets it sizes."""

    panel = "Kubernetes"

    host: str = Field("127.0.0.1", min_length=1, description="address of /metrics")
    metrics_port: int = Field(0, ge=0, le=65535, description="/metrics; 0 = any")
    kubeconfig: Path | None = Field(None, description="default: the pod's service account")
    kubernetes_namespace: str = Field("", description="of the StatefulSets; default: the pod's own")
    stateful_sets: StatefulSetNames = StatefulSetNames()
    served_model_name: str = Field("", description="name of the first model, in metrics and logs")
    models: tuple[ModelPools, ...] = no_flag(
        (),
        max_length=64,
        description="pools of models beside the first, within the same gpu_budget: each with name, stateful_sets and, "
        "where wanted, prefill, decode (limits) and objectives",
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [self.served_model_name, *(one.name for one in self.models)]
        if len(names) != len(set(names)):
            raise ValueError(f"models: a name occurs twice in {names}")
        return self

    @model_validator(mode="after")
    def _pools_differ(self) -> Self:
        """Two policies that size one StatefulSet would undo each other's changes, and count its GPUs twice."""
        sets = [self.stateful_sets, *(one.stateful_sets for one in self.models)]
        names = [name for one in sets for name in (one.prefill, one.decode)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"stateful_sets: {twice[0]} is two pools'")
        return self

    @model_validator(mode="after")
    def _budget_covers_all(self) -> Self:
        pools = [self.prefill, self.decode]
        pools += [self.limits_of(one, role) for one in self.models for role in ROLES]
        least = sum(max(1, pool.min_replicas) * pool.gpus_per_replica for pool in pools)
        if least > self.gpu_budget:
            raise ValueError(
                f"gpu_budget is {self.gpu_budget}, and the smallest pools of all models need {least}"
            )
        return self

    def limits_of(self, pools: ModelPools, role: Role) -> PoolLimits:
        """The limits of a pool. Those that a further model's entry leaves out, as its GPUs, are the first model's."""
        own = pools.prefill if role == "prefill" else pools.decode
        return self.pool(role).model_copy(update=own.model_dump(exclude_unset=True))

    def of_model(self, pools: ModelPools) -> AutoscalingConfig:
        """The policy of a further model. Raises ConfigError."""
        own = pools.model_dump(exclude={"name", "stateful_sets", *ROLES}, exclude_none=True)
        own |= {role: self.limits_of(pools, role) for role in ROLES}
        shared = {name: getattr(self, name) for name in AutoscalingConfig.model_fields}
        try:
            return AutoscalingConfig.model_validate({**shared, **own})
        except ValidationError as error:
            problem = error.errors(include_input=False)[0]["msg"]
            raise ConfigError(f"models: {pools.name}: {problem}", field="models") from None


AUTOSCALE = Flags(AutoscaleConfig)


@AUTOSCALE.add_to
def autoscale(config: ConfigFile = None, ready_file: ReadyFile = None, **flags: Any) -> None:
    """Size both pools on Kubernetes: patches the scale of two StatefulSets, within one budget of GPUs."""
    _run(sources.load(AutoscaleConfig, AUTOSCALE.values(AutoscaleConfig, flags), config), ready_file)


def _run(config: AutoscaleConfig, ready_file: Path | None) -> None:
    from baton.autoscaler.autoscaler import Autoscaler, FurtherModel
    from baton.autoscaler.platforms.kubernetes import StatefulSets, connect, own_namespace
    from baton.autoscaler.rights import rights

    if not config.redis_url:
        raise ConfigError("--redis-url is missing: workers publish their load there", field="redis_url")
    report_redis(config.redis_url, rights(config.namespace))
    logs.configure("autoscaler")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    where = config.kubernetes_namespace or own_namespace()
    api = connect(config.kubeconfig)

    def pools(names: StatefulSetNames) -> StatefulSets:
        return StatefulSets(api, where, {"prefill": names.prefill, "decode": names.decode})

    platform = pools(config.stateful_sets)
    further = [
        FurtherModel(one.name, config.of_model(one), pools(one.stateful_sets)) for one in config.models
    ]
    registry = CollectorRegistry()
    server = MetricsServer(config.host, config.metrics_port, registry, {}, {})
    sets = [config.stateful_sets, *(one.stateful_sets for one in config.models)]
    names = ", ".join(name for one in sets for name in (one.prefill, one.decode))
    tell(f"autoscaler sizes {names} in {where}, {config.gpu_budget} GPUs")
    write_ready(ready_file, {"pid": os.getpid(), "metrics": f"{config.host}:{server.port}"})
    try:
        scaler = Autoscaler(
            config,
            config.redis_url,
            config.namespace,
            platform,
            registry,
            model=config.served_model_name,
            further=further,
        )
        scaler.run(stop)
    finally:
        platform.close()
        server.close()
