"""Repeat an exit notice until decode workers have acknowledged it.

Runs as `python -m baton.ray_pools.supervision.late_exit_report`.
Standard input holds JSON: the configuration of the worker that exited, its id, pid and start time, and the decode
workers that have not answered, as id and address (null: no notice has been sent yet). The replica that sends the first
notice ends at once, so that Ray starts the next one; this process stays until every decode worker has answered or has
left the registry, at most LATE_SECONDS. A stopped decode worker rejoins when it wakes, and keeps its landing slots in
doubt until then.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import redis

from baton.processes import sessions
from baton.processes.exit_notices import ExitNotices
from baton.ray_pools.supervision import worker_sockets
from baton.ray_pools.supervision.worker_sockets import Facts
from cluster.config.worker import WorkerConfig
from cluster.membership.reader import read_workers
from cluster.membership.types import WorkerInfo
from cluster.protocol.times import FORGET_SECONDS
from cluster.security.tls import worker_peers

log = logging.getLogger(__name__)
LATE_SECONDS = 2 * FORGET_SECONDS  # twice the time after which the registry forgets a dead worker
POLL_SECONDS = 1.0
LAUNCH_SECONDS = 20.0


def decode_workers(config: WorkerConfig) -> list[WorkerInfo]:
    """All that are registered, dead leases too: a stopped worker has one. Raises redis.RedisError."""
    return [one for one in read_workers(config.redis_url, config.namespace) if one.role == "decode"]


def launch(config: WorkerConfig, gone: Facts, targets: Mapping[str, str] | None) -> None:
    """Start the process, which outlives this one. Raises OSError or subprocess.SubprocessError."""
    owed = {
        "config": config.model_dump(mode="json", exclude={"secret"}),
        "gone": asdict(gone),
        "targets": None if targets is None else dict(targets),
        "where": str(worker_sockets.directory()),
    }
    command = [sys.executable, "-m", "baton.ray_pools.supervision.late_exit_report"]
    subprocess.run(command, check=True, input=json.dumps(owed).encode(), timeout=LAUNCH_SECONDS)


def deliver(
    config: WorkerConfig,
    gone: Facts,
    targets: Mapping[str, str] | None,
    where: Path,
    seconds: float = LATE_SECONDS,
) -> None:
    """Return when every target has answered or left, after `seconds`, or when the cluster's owner has gone."""
    notices = ExitNotices(worker_peers(config))
    deadline = time.monotonic() + seconds
    while sessions.members(gone.pid, gone.began):  # SIGKILL takes effect only when a driver's call returns
        if time.monotonic() > deadline or worker_sockets.owner_gone(where):
            return
        time.sleep(POLL_SECONDS)
    addresses = dict(targets or {})
    notices.add(gone.worker_id, addresses)
    known = targets is not None
    try:
        while (
            (notices.targets or not known)
            and time.monotonic() < deadline
            and not worker_sockets.owner_gone(where)
        ):
            try:
                addresses = {one.worker_id: one.address for one in decode_workers(config)}
            except redis.RedisError as error:
                log.debug("the addresses of decode workers stay as they were known: %s", error)
            else:
                if not known:
                    notices.add(gone.worker_id, addresses)
                known = True
            notices.send(addresses)
            time.sleep(POLL_SECONDS)
    finally:
        notices.close()


def main() -> None:
    owed: dict[str, Any] = json.load(sys.stdin)
    sessions.detach()
    config = WorkerConfig.model_validate(owed["config"])
    deliver(config, Facts(**owed["gone"]), owed["targets"], Path(owed["where"]))


if __name__ == "__main__":
    main()
