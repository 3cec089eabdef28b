"""Configurations of autoscaling."""

from __future__ import annotations

from baton.autoscaler.config import AutoscalingConfig, PoolLimits


def make_config(**more: object) -> AutoscalingConfig:
    pool = PoolLimits(max_replicas=24, startup_seconds=60)
    return AutoscalingConfig.model_validate(
        {
            "prefill": pool,
            "decode": pool,
            "gpu_budget": 48,
            "ttft_objective_seconds": 5.0,
            "itl_objective_seconds": 0.03,
            "interval_seconds": 30.0,
            **more,
        }
    )
