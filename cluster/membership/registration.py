"""Keeps a worker registered and its lease renewed, on a thread of its own, so that no long step delays a renewal."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import redis

from cluster.membership.registry import Registry
from cluster.membership.status import WorkerStatus
from cluster.membership.types import Then, WorkerInfo
from cluster.protocol.times import LEASE_DEAD_SECONDS, RENEW_SECONDS
from cluster.redis.reasons import reason

log = logging.getLogger(__name__)


class Registration:
    """Registers, renews every RENEW_SECONDS, registers again when Redis has lost the registration, leaves at `stop`.

    The worker starts and serves without Redis, and registers when Redis answers. While `healthy` is false, the lease is
    not renewed: a worker whose engine hangs counts as dead.

    A worker that could not renew for as long as a lease lives (it was stopped, or hung) is fenced: other workers have
    its requests. `rejoin` then ends what it still holds and returns its new epoch. A renewal that failed only because
    Redis did not answer counts as made.

    `on_drain` is called on this thread, with each renewal, once the worker is to drain.
    """

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        info: WorkerInfo,
        *,
        healthy: Callable[[], bool] = lambda: True,
        status: Callable[[], WorkerStatus] = WorkerStatus,
        on_registered: Callable[[int], None] = lambda slot: None,
        on_drain: Callable[[Then], None] = lambda then: None,
        rejoin: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._registry = Registry(redis_url, namespace)
        self._calls = _Calls(info.worker_id, self._registry)
        self._info = replace(info, process=secrets.token_hex(8))
        self._standing = (0, 0)
        self._above = 0
        self._registered: WorkerInfo | None = None  # as Redis has it: not yet under a new epoch, perhaps
        self._drain: Then | None = None
        self._healthy = healthy
        self._status = status
        self._on_registered = on_registered
        self._on_drain = on_drain
        self._rejoin = rejoin
        self._clock = clock
        self._renewed: float | None = None  # when it was last able to renew, whether or not Redis answered
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)

    @property
    def slot(self) -> int:
        """0 until registered."""
        return self._info.slot

    @property
    def name(self) -> str:
        return self._info.name

    @property
    def standing(self) -> tuple[int, int]:
        """(slot, number of registrations): an emptied Redis may assign the same slot again."""
        return self._standing

    @property
    def unreachable(self) -> bool:
        """Whether the last call got no answer."""
        return self._calls.unreachable

    @property
    def errors(self) -> int:
        """Calls that Redis did not answer."""
        return self._calls.errors

    def start(self) -> None:
        self._thread.start()

    def set_draining(self, then: Then) -> None:
        """Mark this worker as draining in Redis: it gets no more requests. A Redis that loses the mark gets it again."""
        self._drain = then
        self._calls.attempt(self._do_drain)

    def stay_above(self, slot: int) -> None:
        """From now on, take only slots above this one: an emptied registry may assign a lower one that a prefix index in
        another Redis still names for another worker."""
        self._above = max(self._above, slot)

    def register_again(self) -> bool:
        """Take a new slot: the index entries under the old one are stale from now on.

        Returns False, and calls nothing, while the lease is not renewed: a registration would revive it.
        """
        if not self._healthy() or self._is_fenced():
            return False
        self._calls.attempt(self._do_register)
        return True

    def set_adapters(self, adapters: tuple[tuple[str, str], ...]) -> bool:
        """Register with these adapters, under a new slot. Returns False if that has to be tried again."""
        with self._lock:
            self._info = replace(self._info, adapters=adapters)
        if not self.register_again():
            return False
        registered = self._registered  # the old one if Redis did not answer: a renewal would keep that
        return registered is not None and registered.adapters == adapters

    def _is_fenced(self) -> bool:
        return self._renewed is not None and self._clock() - self._renewed > LEASE_DEAD_SECONDS

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._calls.attempt(self._do_leave)
        self._registry.close()

    def _run(self) -> None:
        self._renewed = self._clock()
        pause = 0.0  # registers at once
        while not self._stop.wait(pause):
            pause = RENEW_SECONDS
            if not self._healthy():
                continue
            if self._is_fenced() and not self._new_epoch():
                continue
            if self._calls.attempt(self._do_renew if self.slot else self._do_register):
                self._renewed = self._clock()

    def _new_epoch(self) -> bool:
        """Rejoin under a new epoch. Returns False if that has to be tried again."""
        if self._rejoin is None:
            return True
        try:
            epoch = self._rejoin()
        except Exception as error:  # the thread goes on, or the lease would never be renewed
            log.warning("worker %s is fenced and could not rejoin yet: %r", self.name, error)
            return False
        log.warning(
            "worker %s was fenced: it did not renew its lease in time; it rejoins under epoch %016x",
            *(self.name, epoch),
        )
        with self._lock:
            self._info = replace(self._info, epoch=epoch, slot=0)
        return True

    def _do_register(self) -> None:
        with self._lock:
            if self._stop.is_set():  # a late report asks for a new slot, which would never be given up
                return
            info = replace(self._info, slot=0)
            slot = self._registry.register(info, self._status(), self._drain, self._above)
            self._info = replace(info, slot=slot)
            self._registered = self._info
            self._standing = self._info.slot, self._standing[1] + 1
        self._on_registered(self._info.slot)

    def _do_renew(self) -> None:
        drain = self._registry.renew(self._info, self._status())
        if drain is None:
            self._do_register()
        elif drain:
            self._on_drain(drain)
        elif self._drain is not None:  # Redis was away when it was marked, or has lost the mark alone
            self._do_drain()

    def _do_drain(self) -> None:
        if self._registered is not None:
            self._registry.drain(self._info.worker_id, self._drain or "exit")

    def _do_leave(self) -> None:
        with self._lock:
            if self._registered is not None:
                self._registry.leave(self._registered)


class _Calls:
    """Whether calls to the registry succeed; each change is logged once."""

    def __init__(self, worker_id: str, registry: Registry):
        self._worker_id = worker_id
        self._registry = registry
        self._reached = self._failing = False
        self.unreachable = False
        self.errors = 0

    def attempt(self, call: Callable[[], None]) -> bool:
        """Make a call. Returns False if this worker is the reason that it failed: its lease then runs out."""
        try:
            call()
        except redis.RedisError as error:
            self.errors += 1
            self._registry.failed(error)
            if not self.unreachable:
                log.warning("%s; worker %s goes on without it", reason(error), self._worker_id)
            self.unreachable = True
        except Exception:  # the thread goes on, or the lease would never be renewed
            if not self._failing:
                log.exception("the registration of worker %s could not be renewed; retrying", self._worker_id)
            self._failing = True
            return False
        else:
            if self.unreachable:
                log.info("Redis is back" if self._reached else "Redis can be reached now")
            self._reached, self.unreachable, self._failing = True, False, False
        return True
