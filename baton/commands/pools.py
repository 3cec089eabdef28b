"""`baton pools`: deploys the Serve application and keeps it until SIGTERM or Ctrl-C."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

from baton.commands.output import say
from baton.commands.serve import write_ready
from cluster.config import Role, WorkerConfig
from cluster.errors import ConfigError, SetupError

ROLES: tuple[Role, ...] = ("decode", "prefill")


def run_pools(config: Path, address: str, ready_file: Path | None) -> None:
    """`config` is JSON: {"environment": {…}, "prefill": [worker, …], "decode": [worker, …]}."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    import ray

    from baton import pools

    described = _read(config)
    workers = {role: [WorkerConfig.model_validate(one) for one in described.get(role, [])] for role in ROLES}
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        pools.deploy(workers, described.get("environment", {}))
        say("pools are deployed")
        write_ready(ready_file, {"pid": os.getpid()})
        stop.wait()
    except RuntimeError as error:
        raise SetupError(f"the pools did not start: {error}") from error
    finally:
        pools.shutdown()
        ray.shutdown()


def _read(config: Path) -> dict[str, Any]:
    try:
        described: dict[str, Any] = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config}: {error}", field="config") from error
    return described
