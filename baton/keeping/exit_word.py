"""On Ray a replica is its worker's parent: its word that a prefill worker's process has exited ends quarantines at decode
workers, as that of `baton up` does where that is the parent.

The word is given when nothing is left of the worker's session. Ranks on other nodes are no part of that: of a worker
that has some, nothing is said.
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
GRACE_SECONDS = 5.0  # for a process that has said its last word
TELL_SECONDS = 10.0  # a decode worker that is stopped may wake within that time
POLL_SECONDS = 0.1


class ExitWord:
    """`config`: the worker's. `give` blocks, and returns at the latest after some 20 s."""

    def __init__(self, config: WorkerConfig):
        self._config = config

    def give(self, gone: Facts) -> None:
        """Whatever is left of the worker's processes is killed; then every decode worker hears of it."""
        proven = sessions.end(gone.pid, gone.began, GRACE_SECONDS)
        config = self._config
        if config.role != "prefill" or config.engine.nodes > 1 or not config.redis_url:
            return
        if not proven:
            log.error("processes of %s can't be ended: decode workers are told nothing", gone.worker_id)
            return
        try:
            self._tell(gone.worker_id)
        except redis.RedisError as error:
            log.warning("decode workers can't be told that %s has exited: %s", gone.worker_id, error)

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
        workers = read_workers(self._config.redis_url, self._config.namespace)
        return {one.worker_id: one.address for one in workers if one.role == "decode" and one.lease != "dead"}
