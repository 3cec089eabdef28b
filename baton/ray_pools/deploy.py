"""Deploys the pools on the Ray cluster that this process is connected to, and ends them.

Serve takes one policy for both pools only with a declared application, which it builds in a task of its own from an
import path. Serve writes a builder's arguments into its log, so what the builder needs travels in the environment of
that task instead.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.ray_pools.serve_app import PoolDescription, application
from cluster.config.worker import Role
from cluster.errors import SetupError

APPLICATION = "baton"
VARIABLE = "BATON_SCALED_POOLS"
START_SECONDS = 600.0
POLL_SECONDS = 0.2
SHUTDOWN_SECONDS = 30.0


def deploy(
    pools: Mapping[Role, PoolDescription],
    environment: Mapping[str, str],
    autoscaling: ServeAutoscalingConfig | None,
    stop: threading.Event,
) -> None:
    """Deploy the pools and return when they run, or soon after `stop` is set: nothing is deployed after the return.

    With `autoscaling` the pools begin as large as `pools` says and one policy sizes both.
    Raises SetupError if a replica cannot start, the pools do not run in time, or `stop` is set before they do.
    """
    from ray import serve
    from ray.serve._private.api import _get_global_client  # type: ignore[attr-defined]
    from ray.serve.api import _run

    _check(stop)
    serve.start(proxy_location="Disabled")
    _check(stop)
    client: Any = _get_global_client()
    if autoscaling is None:
        _run(application(pools, environment), _blocking=False, name=APPLICATION, route_prefix=None)
        deadline = math.inf
    else:
        _deploy_scaled(client, pools, environment, autoscaling)
        deadline = time.monotonic() + START_SECONDS
    while (status := client.get_serve_status(APPLICATION).app_status).status != "RUNNING":
        if status.status == "DEPLOY_FAILED" or time.monotonic() > deadline:
            raise SetupError(f"the pools did not start: {status.status}: {status.message}")
        _check(stop)
        time.sleep(POLL_SECONDS)


def _check(stop: threading.Event) -> None:
    if stop.is_set():
        raise SetupError("the deployment of the pools was stopped")


def _deploy_scaled(
    client: Any,
    pools: Mapping[Role, PoolDescription],
    environment: Mapping[str, str],
    autoscaling: ServeAutoscalingConfig,
) -> None:
    """Ask Serve for them."""
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    described = {
        "pools": {role: pool.model_dump() for role, pool in pools.items()},
        "environment": dict(environment),
        "autoscaling": autoscaling.model_dump(mode="json"),
    }
    declared = ServeApplicationSchema(
        name=APPLICATION,
        route_prefix=None,
        import_path=f"{__name__}:build",
        runtime_env={"env_vars": {VARIABLE: json.dumps(described)}},
        autoscaling_policy={
            "policy_function": "baton.ray_pools.policy_adapter:PoolsPolicy",
            "policy_kwargs": {"config": described["autoscaling"]},
        },
    )
    client.deploy_apps(ServeDeploySchema(applications=[declared]))


def build(arguments: dict[str, str]) -> Any:
    """Build the application. Called by Serve in a task of its own, without arguments."""
    described = json.loads(os.environ[VARIABLE])
    pools: dict[Role, PoolDescription] = {
        role: PoolDescription.model_validate(one) for role, one in described["pools"].items()
    }
    policy = ServeAutoscalingConfig.model_validate(described["autoscaling"])
    return application(pools, described["environment"], policy)


def shutdown() -> None:
    """End the pools and this process's connection to Ray. Raises SetupError if Serve's controller is still there after
    SHUTDOWN_SECONDS: `serve.shutdown` would say that there is nothing to shut down, and return."""
    import ray
    from ray.serve.context import _disconnect, _get_global_client

    deadline = time.monotonic() + SHUTDOWN_SECONDS
    while (client := _get_global_client(raise_if_no_controller_running=False)) is not None:
        if (left := deadline - time.monotonic()) <= 0:
            raise SetupError(
                f"Serve's controller has not ended them within {SHUTDOWN_SECONDS:.0f} s: it hangs; end the process "
                "ray::ServeController, which Ray starts again, then run Ray's `serve shutdown`",
                field="ray_address",
            )
        client.shutdown(left)  # returns if the time is over, and if the controller ends, be it to start again
        _disconnect()  # type: ignore[no-untyped-call]  # the next turn looks for it by its name
        time.sleep(POLL_SECONDS)
    ray.shutdown()
