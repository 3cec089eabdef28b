"""The workers as one Ray Serve application: two deployments, each replica a whole worker.

Ray manages processes and nothing else: a replica opens its own gRPC port and registers itself, tokens and KV
never pass through Ray. Serve does not see the workers' ports, so a replica's ongoing requests are 0 to it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from typing import Any

import uvloop

from cluster.config import Role, WorkerConfig

# Baton fences a worker at 5 s; Serve restarts it later, so a fenced worker may rejoin until then.
HEALTH_CHECK_PERIOD_SECONDS = 10.0
HEALTH_CHECK_TIMEOUT_SECONDS = 30.0
APPLICATION = "baton"


class Replica:
    """One worker on a loop and thread of its own, so that Serve's loop never delays a token."""

    def __init__(self, config: Mapping[str, Any], environment: Mapping[str, str], other_pool: Any = None):
        os.environ.update(environment)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="worker", daemon=True)
        self._thread.start()
        from baton.workers import start_worker  # torch is imported in the replica, not by who deploys it

        resolved = WorkerConfig.model_validate(config)
        self._worker = self._on_loop(start_worker(resolved), 600.0)
        self._drain_seconds = resolved.drain_seconds

    def _on_loop(self, coroutine: Any, seconds: float) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(seconds)

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if not self._worker.healthy():
            raise RuntimeError("the engine has stopped or hangs")

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            self._on_loop(worker.stop(), self._drain_seconds + 5.0)


def deploy(pools: Mapping[Role, list[WorkerConfig]], environment: Mapping[str, str]) -> None:
    """Deploys the pools on the Ray cluster this process is connected to; returns when they run.

    One application, so that one policy can scale both pools. Serve wants one deployment at its root: the later
    pool is bound to the earlier one, which only keeps its handle.
    Raises RuntimeError if a replica cannot start.
    """
    from ray import serve

    serve.start(proxy_location="Disabled")
    application: Any = None
    for role, configs in pools.items():
        if configs:
            config = configs[0].model_dump(mode="json", exclude={"worker_id"})
            application = _deployment(role, configs).bind(config, dict(environment), application)
    serve.run(application, name=APPLICATION, route_prefix=None)


def _deployment(role: Role, configs: list[WorkerConfig]) -> Any:
    from ray import serve

    return serve.deployment(
        Replica,
        name=f"{role.capitalize()}Pool",
        num_replicas=len(configs),
        ray_actor_options={"num_cpus": configs[0].engine.tensor_parallel},
        graceful_shutdown_timeout_s=configs[0].drain_seconds + 10.0,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=HEALTH_CHECK_PERIOD_SECONDS,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_SECONDS,
        max_ongoing_requests=100,
    )


def shutdown() -> None:
    from ray import serve

    serve.shutdown()  # type: ignore[no-untyped-call]
