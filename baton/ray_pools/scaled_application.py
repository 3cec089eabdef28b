"""The pools' Serve application with one policy for both pools.

Serve takes such a policy only with a declared application, which it builds in a task of its own from an import path.
Serve writes a builder's arguments into its log, so what the builder needs travels in the environment of that task instead.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.ray_pools.application import Pool, application
from cluster.config import sources
from cluster.config.worker import Role, WorkerConfig
from cluster.errors import SetupError

VARIABLE = "BATON_SCALED_POOLS"
START_SECONDS = 600.0
POLL_SECONDS = 0.2


def deploy(
    name: str,
    pools: Mapping[Role, Pool],
    environment: Mapping[str, str],
    autoscaling: ServeAutoscalingConfig,
) -> None:
    """Deploy, and return when the application runs. Raises SetupError."""
    from ray.serve._private.api import _get_global_client  # type: ignore[attr-defined]
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    described = {
        "pools": {
            role: {
                "given": dict(pool.given),
                "replicas": pool.replicas,
                "gpus": pool.gpus,
                "resources": dict(pool.resources),
            }
            for role, pool in pools.items()
        },
        "environment": dict(environment),
        "autoscaling": autoscaling.model_dump(mode="json"),
    }
    declared = ServeApplicationSchema(
        name=name,
        route_prefix=None,
        import_path=f"{__name__}:build",
        runtime_env={"env_vars": {VARIABLE: json.dumps(described)}},
        autoscaling_policy={
            "policy_function": "baton.ray_pools.policy_adapter:PoolsPolicy",
            "policy_kwargs": {"config": described["autoscaling"]},
        },
    )
    client: Any = _get_global_client()
    client.deploy_apps(ServeDeploySchema(applications=[declared]))
    _wait_until_running(client, name)


def _wait_until_running(client: Any, name: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        status = client.get_serve_status(name).app_status
        if status.status == "RUNNING":
            return
        if status.status == "DEPLOY_FAILED" or time.monotonic() > deadline:
            raise SetupError(f"the pools did not start: {status.status}: {status.message}")
        time.sleep(POLL_SECONDS)


def build(arguments: dict[str, str]) -> Any:
    """Build the application. Called by Serve in a task of its own, without arguments."""
    described = json.loads(os.environ[VARIABLE])
    pools: dict[Role, Pool] = {
        role: Pool(config=sources.load(WorkerConfig, {}, values=one["given"]), **one)
        for role, one in described["pools"].items()
    }
    return application(
        pools, described["environment"], ServeAutoscalingConfig.model_validate(described["autoscaling"])
    )
