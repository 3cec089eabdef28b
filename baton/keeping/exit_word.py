"""Tells decode workers that a prefill worker on Ray has exited, which ends the quarantine of its landing slots.

The Ray replica that started the worker sends this notice, as `baton up` does for the workers that it starts. It is sent
only when no process of the worker's session is left. Ranks on other nodes are not in that session, so for a worker
that spans nodes no notice is sent.
"""

from __future__ import annotations

import logging
import time

import redis

from baton.keeping import sessions
from baton.keeping.places import Facts
from baton.local.exit_notices import ExitNotices
from cluster.config import WorkerConfig
from cluster.membership.reader import read_workers
from cluster.tls import Peers, make_identity

log = logging.getLogger(__name__)
GRACE_SECONDS = 5.0  # between the worker's last message and SIGKILL
TELL_SECONDS = 10.0  # how long delivery is retried: a decode worker may be stopped for a moment
POLL_SECONDS = 0.1


class ExitWord:
    """Sends the exit notice of one worker, whose configuration is `config`."""

    def __init__(self, config: WorkerConfig):
        self._config = config

    def give(self, gone: Facts) -> None:
        """Kill what is left of the worker's processes, then notify every decode worker. Blocks, for 20 s at most."""
        proven = sessions.end(gone.pid, gone.began, GRACE_SECONDS)
        config = self._config
        if config.role != "prefill" or config.engine.nodes > 1 or not config.redis_url:
            return
        if not proven:
            log.error("processes of %s survive SIGKILL: its landing slots stay in doubt", gone.worker_id)
            return
        try:
            self._tell(gone.worker_id)
        except redis.RedisError as error:
            log.warning(
                "the exit of %s was not sent to decode workers, Redis failed: %s", gone.worker_id, error
            )

    def _tell(self, worker_id: str) -> None:
        config = self._config
        notices = ExitNotices(Peers(make_identity(config.tls_cert, config.tls_key, config.tls_ca)))
        deadline = time.monotonic() + TELL_SECONDS
        try:
            addresses = self._decode_workers()
            notices.add(worker_id, addresses)
            notices.send(addresses)
            while notices.waiting and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                notices.send(addresses)
        finally:
            notices.close()

    def _decode_workers(self) -> dict[str, str]:
        """All that are registered: one whose lease ran out may only be stopped, and needs the notice when it rejoins."""
        workers = read_workers(self._config.redis_url, self._config.namespace)
        return {one.worker_id: one.address for one in workers if one.role == "decode"}
