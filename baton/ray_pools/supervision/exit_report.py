"""Tells decode workers that a prefill worker on Ray has exited, which ends the quarantine of its landing slots.

The Ray replica that started the worker sends this notice, as `baton up` does for the workers that it starts. It is sent
only when no process of the worker's session is left. Ranks on other nodes are not in that session, so for a worker
that spans nodes no notice is sent.

Decode workers that do not answer in time, or whose lease is dead (a stopped one), are notified by
baton/ray_pools/supervision/late_exit_report.py.
"""

from __future__ import annotations

import logging
import subprocess
import time

import redis

from baton.processes import sessions
from baton.processes.exit_notices import ExitNotices
from baton.ray_pools.supervision import late_exit_report
from baton.ray_pools.supervision.worker_sockets import Facts
from cluster.config.worker import WorkerConfig
from cluster.security.tls import worker_peers

log = logging.getLogger(__name__)
GRACE_SECONDS = 5.0  # between the worker's last message and SIGKILL
TELL_SECONDS = 10.0  # how long the replica waits for answers
POLL_SECONDS = 0.1


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
            self._tell_later(gone, None)
            return
        waiting: dict[str, str] | None = None
        try:
            waiting = self._tell(gone.worker_id)
        except redis.RedisError as error:
            log.warning("the exit of %s is sent later, Redis failed: %s", gone.worker_id, error)
        if waiting is None or waiting:
            self._tell_later(gone, waiting)

    def _tell(self, worker_id: str) -> dict[str, str]:
        """Return those that have not answered, id and address."""
        workers = late_exit_report.decode_workers(self._config)
        addresses = {one.worker_id: one.address for one in workers}
        answering = {one.worker_id for one in workers if one.lease != "dead"}
        notices = ExitNotices(worker_peers(self._config))
        deadline = time.monotonic() + TELL_SECONDS
        try:
            notices.add(worker_id, addresses)
            notices.send(addresses)
            while notices.targets & answering and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                notices.send(addresses)
            return {target: addresses[target] for target in notices.targets}
        finally:
            notices.close()

    def _tell_later(self, gone: Facts, waiting: dict[str, str] | None) -> None:
        try:
            late_exit_report.launch(self._config, gone, waiting)
        except (OSError, subprocess.SubprocessError) as error:
            worker_id = gone.worker_id
            log.error(
                "no process repeats the exit notice of %s, its landing slots may stay in doubt: %r",
                worker_id,
                error,
            )
