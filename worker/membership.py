"""A worker in the registry and in the prefix index. Without Redis (`redis_url` empty) it does nothing."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import redis

from cluster.config.worker import WorkerConfig
from cluster.index.reporter import ChainReporter
from cluster.membership.registration import Registration
from cluster.membership.repeated_reads import AllWorkers
from cluster.membership.status import WorkerStatus
from cluster.membership.topology import Locating
from cluster.membership.types import Then, WorkerInfo
from cluster.redis.rights import RightsWatch
from worker.ending import Ending
from worker.identity import WorkerIdentity
from worker.loaded_engine import LoadedEngine
from worker.rights import redis_rights

log = logging.getLogger(__name__)
T = TypeVar("T")
RESYNC_SECONDS = 10.0
REJOIN_SECONDS = 10.0


@dataclass(eq=False)
class Membership:
    """`status` runs on the registration's thread. `rejoin` ends, after the worker was fenced, what the old epoch began and
    returns the new one."""

    config: WorkerConfig
    identity: WorkerIdentity
    locating: Locating
    engine: LoadedEngine
    ending: Ending
    status: Callable[[], WorkerStatus]
    rejoin: Callable[[], Coroutine[Any, Any, int]]

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._registration: Registration | None = None
        self._starting = threading.Lock()
        self._reporter: ChainReporter | None = None
        self._others: AllWorkers | None = None  # once it drains: in a large fleet many drain at a time
        self._watches: list[RightsWatch] = []

    def start(self) -> None:
        config = self.config
        if not config.redis_url:
            return
        location = self.locating.location()
        with self._starting:
            self._registration = Registration(
                config.redis_url,
                config.namespace,
                self.identity.registration(location),
                healthy=self.engine.responds,
                status=self.status,
                rejoin=lambda: self._on_loop(self.rejoin(), REJOIN_SECONDS),
                on_drain=self.ending.ask_drain,
            )
        self._reporter = ChainReporter(
            config.redis_url,
            config.namespace,
            self.identity.model_id,
            self._registration,
            lambda: self._on_loop(self.engine.held_chains(), RESYNC_SECONDS),
            index_url=config.index_url,
        )
        self._watches = [RightsWatch(url, needed) for url, needed in redis_rights(config)]
        self._registration.start()
        self._reporter.start()
        for watch in self._watches:
            watch.start()

    def _on_loop(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        """Run a coroutine from another thread. Raises TimeoutError; the coroutine is cancelled then."""
        running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return running.result(seconds)
        except TimeoutError:
            running.cancel()
            raise

    def set_adapters(self, adapters: tuple[tuple[str, str], ...]) -> bool:
        """Register with these adapters; before `start`, let the first registration have them. Blocks. Returns False if
        that has to be tried again."""
        with self._starting:
            if self._registration is None:
                self.identity.adapters = adapters
                return True
        return self._registration.set_adapters(adapters)

    def report(self, hashes: list[bytes], held: int) -> None:
        """Report a prefix chain to the index. Any thread."""
        if self._reporter is not None:
            self._reporter.report(hashes, held)

    @property
    def registered(self) -> bool:
        """False while Redis has not registered the worker; True without Redis."""
        return self._registration is None or self.has_slot

    @property
    def has_slot(self) -> bool:
        return self._registration is not None and self._registration.slot != 0

    @property
    def redis_up(self) -> bool:
        return self._registration is not None and not self._registration.unreachable

    @property
    def redis_errors(self) -> int:
        return self._registration.errors if self._registration is not None else 0

    @property
    def index_up(self) -> bool:
        """Whether the Redis with the prefix index answers."""
        return self._reporter is not None and self._reporter.index_up

    @property
    def reports_waiting(self) -> int:
        """Prefix chains that are not in the index yet."""
        return self._reporter.waiting if self._reporter is not None else 0

    async def set_draining(self, then: Then) -> None:
        if self._registration is not None:
            await asyncio.to_thread(self._registration.set_draining, then)

    async def has_successor(self, adapters: Collection[str] = ()) -> bool:
        """Whether other workers could continue this one's requests, which have these adapters (digests); False if Redis
        does not answer."""
        try:
            workers = await asyncio.to_thread(self._read_others)
        except (redis.RedisError, ValueError) as error:
            log.debug("%s: successors are unknown: %s", self.identity.worker_id, error)
            return False
        successors = [
            worker
            for worker in workers
            if worker.worker_id != self.identity.worker_id
            and (worker.role, worker.model_id) == (self.config.role, self.identity.model_id)
            and (worker.state, worker.lease) == ("ready", "live")
            and _of_model(self.config.served_model_name, worker)
        ]
        loaded = {digest for worker in successors for _, digest in worker.adapters}
        return bool(successors) and loaded.issuperset(adapters)

    def _read_others(self) -> list[WorkerInfo]:
        """Raises redis.RedisError or ValueError."""
        if self._others is None:
            self._others = AllWorkers(self.config.redis_url, self.config.namespace)
        return self._others.read()

    async def stop(self) -> None:
        """Deregister, so that nothing new is placed here."""
        for part in (self._registration, self._reporter, *self._watches):
            if part is not None:
                await asyncio.to_thread(part.stop)
        if self._others is not None:
            self._others.close()


def _of_model(name: str, worker: WorkerInfo) -> bool:
    """Whether routers of several models give the worker requests of a worker that registers with `name`: two models may be
    of one checkpoint. "" may be the first one's."""
    return not name or worker.served_model in ("", name)
