"""Deploys the pools on the Ray cluster that this process is connected to, and ends them."""

from __future__ import annotations

from collections.abc import Mapping

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.ray_pools import scaled_application
from baton.ray_pools.application import Pool, application
from cluster.config.worker import Role

APPLICATION = "baton"


def deploy(
    pools: Mapping[Role, Pool],
    environment: Mapping[str, str],
    autoscaling: ServeAutoscalingConfig | None = None,
) -> None:
    """Deploy the pools and return when they run.

    With `autoscaling` the pools begin as large as `pools` says and one policy sizes both.
    Raises RuntimeError if a replica cannot start, SetupError if they do not run in time.
    """
    from ray import serve

    serve.start(proxy_location="Disabled")
    if autoscaling is None:
        serve.run(application(pools, environment), name=APPLICATION, route_prefix=None)
    else:
        scaled_application.deploy(APPLICATION, pools, environment, autoscaling)


def shutdown() -> None:
    from ray import serve

    serve.shutdown()  # type: ignore[no-untyped-call]
