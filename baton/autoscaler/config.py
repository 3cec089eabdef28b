"""Objectives of the policy, and limits on how quickly it acts."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from cluster.config.base import Frozen
from cluster.config.worker import ROLES, Role


class PoolLimits(Frozen):
    """Limits of one pool."""

    panel = "Pools"

    min_replicas: int = Field(1, ge=0, description="fewest replicas; 0 needs scale_to_zero")
    max_replicas: int = Field(8, ge=1, description="most replicas")
    gpus_per_replica: int = Field(1, ge=1, description="GPUs of one replica, counted in gpu_budget")
    startup_seconds: float = Field(
        60.0,
        gt=0,
        description="how long a replica may take from being asked for to its first request, pulling and loading included",
    )


class AutoscalingConfig(Frozen):
    """The policy of both pools."""

    panel = "Policy"

    prefill: PoolLimits = PoolLimits()
    decode: PoolLimits = PoolLimits()
    gpu_budget: int = Field(16, ge=1, description="GPUs that both pools share, draining replicas included")
    ttft_objective_seconds: float = Field(2.0, gt=0, description="time to first token")
    itl_objective_seconds: float = Field(0.05, gt=0, description="mean time between a request's tokens")
    attainment: float = Field(0.99, gt=0.5, lt=1, description="share of requests that must meet an objective")
    interval_seconds: float = Field(10.0, gt=0, description="time between decisions")
    load_seconds: float = Field(
        300.0, gt=0, description="the load is the mean over this; peaks over a fifth of it"
    )
    confirm_seconds: float = Field(
        15.0, ge=0, description="how long more replicas must be needed before a pool grows"
    )
    scale_down_seconds: float = Field(
        1800.0, gt=0, description="a pool shrinks to the most that was needed within this time"
    )
    scale_down_margin: float = Field(
        0.1,
        ge=0,
        description="a pool shrinks only to a size that could serve this share more than the present load",
    )
    kv_usage_limit: float = Field(
        0.85, gt=0, le=1, description="share of a decode worker's KV blocks to fill"
    )
    unschedulable_seconds: float = Field(
        300.0,
        gt=0,
        description="replicas that have not started this long after startup_seconds are released, unless Kubernetes "
        "reports that they are starting",
    )
    retry_seconds: float = Field(
        300.0, gt=0, description="pause before such replicas are requested again; doubles up to an hour"
    )
    scale_to_zero: bool = Field(
        False,
        description="an idle prefill pool with min_replicas 0 scales to zero; decode workers "
        "then prefill by themselves (local_prefill fallback or auto) until it has replicas again",
    )
    idle_seconds: float = Field(1800.0, gt=0, description="a pool without a request for this long is idle")

    @model_validator(mode="after")
    def _can_be_kept(self) -> Self:
        for role in ROLES:
            pool = self.pool(role)
            if pool.max_replicas < pool.min_replicas:
                raise ValueError(f"{role}.max_replicas is below {role}.min_replicas")
            if pool.min_replicas == 0 and not self.scale_to_zero:
                raise ValueError(f"{role}.min_replicas is 0: set scale_to_zero, or at least 1")
        if self.decode.min_replicas == 0:
            raise ValueError("decode.min_replicas is 0: without a decode worker no request would be noticed")
        least = sum(max(1, self.pool(role).min_replicas) * self.pool(role).gpus_per_replica for role in ROLES)
        if least > self.gpu_budget:
            raise ValueError(f"gpu_budget is {self.gpu_budget}, and the smallest pools need {least}")
        return self

    def pool(self, role: Role) -> PoolLimits:
        return self.prefill if role == "prefill" else self.decode


class ServeAutoscalingConfig(AutoscalingConfig):
    """The policy in Ray Serve's controller, and the address of its metrics."""

    panel = "Metrics"

    metrics_host: str = Field(
        "127.0.0.1", min_length=1, description="address of /metrics, on the controller's node"
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="0 = any: the controller's log names it")
