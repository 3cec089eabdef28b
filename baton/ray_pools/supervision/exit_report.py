"""Notifies decode workers that a prefill worker on Ray has exited, which ends the quarantine of its landing slots.

The Ray replica that started the worker sends this notice, as `baton up` does for the workers that it starts. It is sent
only when no process of the worker's session is left. Ranks on other nodes are not in that session, so for a worker
that spans nodes no notice is sent.

Decode workers that do not answer in time, or whose lease is dead (a stopped one), are notified by a process of its own,
`python -m baton.ray_pools.supervision.exit_report`. Its standard input holds JSON: the configuration of the worker that
exited, its id, pid and start time, the decode workers that have not answered, as id and address (null: no notice has
been sent yet), and the directory of the cluster's sockets. The replica ends at once, so that Ray starts the next one;
this process stays until every decode worker has answered or has left the registry, at most LATE_SECONDS. A stopped
decode worker rejoins when it wakes, and keeps its landing slots in doubt until then.
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
GRACE_SECONDS = 5.0  # between the worker's last message and SIGKILL
ANSWER_SECONDS = 10.0  # how long the replica waits for answers
POLL_SECONDS = 0.1
LATE_SECONDS = 2 * FORGET_SECONDS  # twice the time after which the registry forgets a dead worker
LATE_POLL_SECONDS = 1.0
LAUNCH_SECONDS = 20.0


class ExitReport:
    """Sends the exit notice of one worker, whose configuration is `config`."""

    def __init__(self, config: WorkerConfig):
        self._config = config

    def give(self, gone: Facts) -> None:
        """Kill what is left of the worker's processes, then notify every decode worker. Blocks, for 40 s at most."""
        proven = sessions.end(gone.pid, gone.began, GRACE_SECONDS)
        config = self._config
        if config.role != "prefill" or config.engine.nodes > 1 or not config.redis_url:
            return
        if not proven:
            log.error(
                "processes of %s survive SIGKILL: its landing slots stay in doubt until they end",
                gone.worker_id,
            )
            self._notify_later(gone, None)
            return
        waiting: dict[str, str] | None = None
        try:
            waiting = self._notify(gone.worker_id)
        except redis.RedisError as error:
            log.warning("the exit of %s is sent later, Redis failed: %s", gone.worker_id, error)
        if waiting is None or waiting:
            self._notify_later(gone, waiting)

    def _notify(self, worker_id: str) -> dict[str, str]:
        """Send the notice for ANSWER_SECONDS at most; return the decode workers without an answer, as id and address."""
        workers = decode_workers(self._config)
        addresses = {one.worker_id: one.address for one in workers}
        answering = {one.worker_id for one in workers if one.lease != "dead"}
        notices = ExitNotices(worker_peers(self._config))
        deadline = time.monotonic() + ANSWER_SECONDS
        try:
            notices.add(worker_id, addresses)
            notices.send(addresses)
            while notices.targets & answering and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                notices.send(addresses)
            return {target: addresses[target] for target in notices.targets}
        finally:
            notices.close()

    def _notify_later(self, gone: Facts, waiting: dict[str, str] | None) -> None:
        try:
            launch(self._config, gone, waiting)
        except (OSError, subprocess.SubprocessError) as error:
            worker_id = gone.worker_id
            log.error(
                "no process repeats the exit notice of %s, its landing slots may stay in doubt: %r",
                worker_id,
                error,
            )


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
    command = [sys.executable, "-m", "baton.ray_pools.supervision.exit_report"]
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
        time.sleep(LATE_POLL_SECONDS)
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
            time.sleep(LATE_POLL_SECONDS)
    finally:
        notices.close()


def main() -> None:
    owed: dict[str, Any] = json.load(sys.stdin)
    sessions.detach()
    config = WorkerConfig.model_validate(owed["config"])
    deliver(config, Facts(**owed["gone"]), owed["targets"], Path(owed["where"]))


if __name__ == "__main__":
    main()
