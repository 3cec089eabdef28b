"""`baton pools`: deploys the Serve application and keeps it until SIGTERM or Ctrl-C."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

from baton.autoscaling.config import ServeAutoscalingConfig
from baton.commands.output import say
from baton.commands.serve import write_ready
from cluster import settings
from cluster.config import Role, WorkerConfig
from cluster.errors import ConfigError, SetupError

ROLES: tuple[Role, ...] = ("decode", "prefill")


def run_pools(config: Path, address: str, ready_file: Path | None) -> None:
    """`config` is JSON: {"environment": {…}, "prefill": [worker, …], "decode": [worker, …]}, and
    "autoscaling": {…} (baton/autoscaling/config.py) where the pools are to be sized by load."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    import ray

    from baton import pools

    described = _read(config)
    workers = {
        role: [settings.load(WorkerConfig, {}, values=one) for one in described.get(role, [])]
        for role in ROLES
    }
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        pools.deploy(workers, described.get("environment", {}), _autoscaling(described))
        say("pools are deployed")
        write_ready(ready_file, {"pid": os.getpid()})
        stop.wait()
    except RuntimeError as error:
        raise SetupError(f"the pools did not start: {error}") from error
    finally:
        pools.shutdown()
        ray.shutdown()


def _autoscaling(described: dict[str, Any]) -> ServeAutoscalingConfig | None:
    """Raises ConfigError."""
    given = described.get("autoscaling")
    return None if given is None else settings.load(ServeAutoscalingConfig, given)


def _read(config: Path) -> dict[str, Any]:
    try:
        described: dict[str, Any] = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config}: {error}", field="config") from error
    return described
