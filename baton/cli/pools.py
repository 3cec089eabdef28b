"""`baton pools`: deploys the Serve application and keeps it until SIGTERM or Ctrl-C."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.cli.output import say
from baton.cli.serve import ReadyFile, write_ready
from cluster.config import sources
from cluster.errors import ConfigError, SetupError

RAY_SECONDS = 60.0
RETRY_SECONDS = 0.5


def pools(
    config: Annotated[Path, typer.Option(help="JSON: {prefill: [worker…], decode: [worker…]}.")],
    address: Annotated[str, typer.Option(help="Ray cluster, host:port.")] = "auto",
    deployed: Annotated[
        bool,
        typer.Option("--deployed", help="The pools run there already: only stay, and end them in the end."),
    ] = False,
    ready_file: ReadyFile = None,
) -> None:
    """Deploy both pools on a Ray cluster as one Serve application, and stay until told to stop."""
    # `config`: {"environment": {…}, "prefill": [worker, …], "decode": [worker, …]}, and "autoscaling": {…}
    # (baton/autoscaler/config.py) where the pools are to be sized by load.
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    import ray

    from baton.ray_pools.deploy import deploy, shutdown
    from baton.ray_pools.serve_app import ROLES, PoolDescription

    described = _read(config)
    found = {
        role: PoolDescription(replicas=len(alike), config=alike[0])
        for role in ROLES
        if (alike := described.get(role))
    }
    for pool in found.values():
        pool.worker()  # an error in a configuration is reported before Ray is waited for
    _connect(address, stop)
    try:
        if not deployed:
            policy = described.get("autoscaling")
            scaled = None if policy is None else sources.load(ServeAutoscalingConfig, policy)
            deploy(found, described.get("environment", {}), scaled)
            say("pools are deployed")
        write_ready(ready_file, {"pid": os.getpid()})
        stop.wait()
    except RuntimeError as error:
        raise SetupError(f"the pools did not start: {error}") from error
    finally:
        shutdown()
        ray.shutdown()


def _connect(address: str, stop: threading.Event) -> None:
    """Ray may be starting: it is waited for. Raises SetupError."""
    import ray

    deadline = time.monotonic() + RAY_SECONDS
    while True:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            return
        except (ConnectionError, RuntimeError, ValueError) as error:
            if stop.wait(RETRY_SECONDS) or time.monotonic() > deadline:
                raise SetupError(f"no Ray at {address}: {error}", field="address") from error


def _read(config: Path) -> dict[str, Any]:
    try:
        described: dict[str, Any] = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config}: {error}", field="config") from error
    return described
