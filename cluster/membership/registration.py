"""A worker's place in the registry, kept by a thread of its own so that no long step delays a renewal."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import cast

import redis

from cluster.membership import keys, scripts
from cluster.membership.status import WorkerStatus
from cluster.membership.types import Then, WorkerInfo
from cluster.protocol.times import LEASE_DEAD_SECONDS, RENEW_SECONDS
from cluster.redis.connect import connect
from cluster.redis.elsewhere import leave

log = logging.getLogger(__name__)


def encode(info: WorkerInfo) -> str:
    facts = asdict(info)
    del facts["lease"], facts["status"], facts["state"]  # what others find out, or say
    facts["layout"] = info.layout.hex()
    facts["epoch"] = f"{info.epoch:016x}"
    return json.dumps(facts)


class Registration:
    """Registers, renews every 0.5 s, registers again when Redis no longer knows us, leaves at `stop`.

    The worker starts and serves without Redis; it registers when Redis comes. While `healthy` says no, the lease
    is left to run out: a hung engine is a dead worker.

    A worker that has not been able to renew for as long as a lease lives (it was stopped, or hung) has been fenced:
    others have given its work to somebody else. `rejoin` then ends what it still holds and returns its new epoch.
    Renewals that failed because Redis was away do not count: by its own clock the worker was there.

    `on_drain` hears, on our thread and again with each renewal, that somebody wants this worker to leave.
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
        self._client = connect(redis_url)
        self._keys = keys.registry(namespace)
        self._register = self._client.register_script(scripts.REGISTER)
        self._renew = self._client.register_script(scripts.RENEW)
        self._leave = self._client.register_script(scripts.LEAVE)
        self._drain_script = self._client.register_script(scripts.DRAIN)
        self._info = replace(info, process=secrets.token_hex(8))
        self._left = False
        self._standing = (0, 0)
        self._registered: WorkerInfo | None = None  # as Redis knows it: a new life may not be there yet
        self._drain: Then | None = None
        self._healthy = healthy
        self._status = status
        self._on_registered = on_registered
        self._on_drain = on_drain
        self._rejoin = rejoin
        self._clock = clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._reached = self._unreachable = self._failing = False
        self.errors = 0  # calls that Redis did not answer
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
        """The last call got no answer."""
        return self._unreachable

    def start(self) -> None:
        self._thread.start()

    def set_draining(self, then: Then) -> None:
        """Placed on no more, from the moment Redis knows it; it is said again to a Redis that has forgotten."""
        self._drain = then
        self._try(self._do_drain)

    def register_again(self) -> None:
        """A new slot: what the index holds under the old one is stale from now on."""
        self._try(self._do_register)

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._try(self._do_leave)
        self._client.close()

    def _run(self) -> None:
        there = self._clock()  # when this worker could speak for itself last
        while not self._stop.wait(0 if self.slot == 0 and not self._unreachable else RENEW_SECONDS):
            if not self._healthy():
                continue
            if self._clock() - there > LEASE_DEAD_SECONDS and not self._new_life():
                continue
            if self._try(self._do_renew if self.slot else self._do_register):
                there = self._clock()

    def _new_life(self) -> bool:
        """False if it has to be tried again."""
        if self._rejoin is None:
            return True
        try:
            epoch = self._rejoin()
        except Exception as error:  # the thread goes on, or the lease would never be renewed
            log.warning("fenced, and not able to rejoin yet: %r", error)
            return False
        log.warning("fenced: it was silent for longer than a lease; rejoining under a new epoch")
        with self._lock:
            self._info = replace(self._info, epoch=epoch, slot=0)
        return True

    def _try(self, action: Callable[[], None]) -> bool:
        """False if that it failed is this worker's own doing: its lease runs out, as others see it."""
        try:
            action()
        except redis.RedisError as error:
            self.errors += 1
            leave(self._client, error)
            if not self._unreachable:
                log.warning("Redis is out of reach, going on without it: %s", error)
            self._unreachable = True
        except Exception:  # the thread goes on, or the lease would never be renewed
            if not self._failing:
                log.exception("the registration could not be renewed; it is tried again")
            self._failing = True
            return False
        else:
            if self._unreachable:
                log.info("Redis is back" if self._reached else "Redis can be reached now")
            self._reached, self._unreachable, self._failing = True, False, False
        return True

    def _do_register(self) -> None:
        with self._lock:
            if self._left:  # a late report asks for a new slot: it would be waited for as one that died
                return
            info = replace(self._info, slot=0)
            answer = self._register(
                keys=self._keys,
                args=[
                    info.worker_id,
                    info.name,
                    encode(info),
                    json.dumps(self._status().encode()),
                    info.process,
                    self._drain or "",
                ],
            )
            self._info = replace(info, slot=int(answer))
            self._registered = self._info
            self._standing = self._info.slot, self._standing[1] + 1
        self._on_registered(self._info.slot)

    def _do_renew(self) -> None:
        info = self._info
        drain = self._renew(
            keys=self._keys, args=[info.worker_id, info.name, info.slot, json.dumps(self._status().encode())]
        )
        if drain is None:
            self._do_register()
        elif drain:
            self._on_drain(cast(Then, drain.decode()))

    def _do_drain(self) -> None:
        if self._registered is not None:
            self._drain_script(keys=self._keys, args=[self._info.worker_id, self._drain or "exit"])

    def _do_leave(self) -> None:
        with self._lock:
            self._left = True
            if (known := self._registered) is not None:
                self._leave(keys=self._keys, args=[known.worker_id, known.name, known.slot])
