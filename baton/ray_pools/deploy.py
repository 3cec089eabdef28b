"""Deploys the pools on the Ray cluster that this process is connected to, and ends them.

Serve takes one policy for both pools only with a declared application, which it builds in a task of its own from an
import path. Serve writes a builder's arguments into its log, so what the builder needs travels in the environment of
that task instead.
"""

from __future__ import annotations

import contextlib
import json
import logging
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

log = logging.getLogger(__name__)
APPLICATION = "baton"
VARIABLE = "BATON_SCALED_POOLS"
START_SECONDS = 600.0
POLL_SECONDS = 0.2
SHUTDOWN_SECONDS = 30.0
CONTROLLER_SECONDS = 60.0  # one that Ray starts again needs some
NAMED_SECONDS = 2.0  # of a controller's silence, after which the log names it


def deploy(
    pools: Mapping[Role, PoolDescription],
    environment: Mapping[str, str],
    autoscaling: ServeAutoscalingConfig | None,
    stop: threading.Event,
) -> None:
    """Deploy the pools and return when they run, or soon after `stop` is set: nothing is deployed after the return. Call
    `reach_controller` before: Serve would wait for a controller that hangs without a limit.

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
    from ray.exceptions import GetTimeoutError, RayActorError

    deadline = time.monotonic() + SHUTDOWN_SECONDS
    while (controller := _controller()) is not None:
        if (left := deadline - time.monotonic()) <= 0:
            raise SetupError(
                f"Serve's controller has not ended them within {SHUTDOWN_SECONDS:.0f} s: it hangs; end the process "
                "ray::ServeController, which Ray starts again, then run Ray's `serve shutdown`",
                field="ray_address",
            )
        # It answers when it has ended them, or ends itself, be it to start again: the next turn looks.
        with contextlib.suppress(GetTimeoutError, RayActorError):
            ray.get(controller.graceful_shutdown.remote(), timeout=left)
        time.sleep(POLL_SECONDS)
    ray.shutdown()


def disconnect() -> None:
    """End this process's connection to Ray, and nothing else."""
    import ray

    ray.shutdown()


def _controller() -> Any:
    """Serve's controller, by its name alone, which Ray's head answers; None if there is none. Serve's own client asks the
    controller itself when it is made, without a limit of time, and would wait for one that hangs."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return None


def reach_controller(stop: threading.Event) -> None:
    """Wait for a controller that exists, as Serve's start would without a limit. Raises SetupError if it does not answer,
    or `stop` is set meanwhile."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    if (controller := _controller()) is None:
        return
    answer = controller.check_alive.remote()
    asked, named = time.monotonic(), False
    while True:
        try:
            ray.get(answer, timeout=POLL_SECONDS)
            return
        except RayActorError:  # it ends: Serve starts another
            return
        except GetTimeoutError:
            _check(stop)
        silent = time.monotonic() - asked
        if silent > NAMED_SECONDS and not named:
            named = True
            log.warning(
                "Serve's controller has not responded for %.0f s: waiting for it, %.0f s at most",
                NAMED_SECONDS,
                CONTROLLER_SECONDS,
            )
        if silent > CONTROLLER_SECONDS:
            raise SetupError(
                f"Serve's controller has not responded for {CONTROLLER_SECONDS:.0f} s: it hangs; end the process "
                "ray::ServeController, which Ray starts again",
                field="ray_address",
            )
