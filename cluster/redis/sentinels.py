"""The master that Sentinels name, asked again every second.

A failover does not end the connections to a master that was only slow. Until a Sentinel demotes it, ten seconds later, it
answers as a master, and its clients would not share keys with those of the new one.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from cluster.redis.deadline import closed_when_late
from cluster.redis.urls import Address, Seeds

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0  # between two queries; the Sentinels take turns
# A master that no Sentinel has named for so long may be replaced by one of a lower epoch: Sentinels that were set up again
# count epochs from 0. The answer of an outvoted Sentinel is used only after OUTVOTED_SECONDS: the others may not answer
# for a moment.
CONFIRM_SECONDS = 5.0
# A master whose epoch is higher is used at once. If most Sentinels have gone on naming another one for so long, its epoch
# is wrong: Sentinels exchange epochs within seconds of a failover.
OUTVOTED_SECONDS = 10.0
# Per Sentinel: an answer is as old as a round of queries, and some of these are not answered.
_FRESH_SECONDS = 3.0


class NotFoundError(redis.ConnectionError):
    """No seed says which server has the keys."""


class Master(NamedTuple):
    address: Address
    epoch: int  # grows with each failover


class Sentinels:
    """Shared by all connections of a process to the same URL: see `sentinels_of`."""

    def __init__(self, seeds: Seeds, options: Mapping[str, Any]):
        self._seeds = seeds
        self._options = {**options, "retry": Retry(NoBackoff(), 0)}
        self._lock = threading.Lock()
        self._master: Master | None = None
        self._confirmed = 0.0  # when a Sentinel last named it
        self._answers: dict[Address, tuple[Master, float]] = {}  # of each Sentinel the last one, and when
        self._outvoted_since: float | None = None  # most Sentinels have named one other master since then
        # Sentinels that most others contradicted, until they agree with them.
        self._doubted: set[Address] = set()
        self._thread: threading.Thread | None = None

    def ask(self, seed: Address) -> Address:
        """Ask this Sentinel; return the newest master known. Raises NotFoundError or redis.RedisError."""
        with contextlib.closing(_SentinelConnection(seed, self._options)) as connection:
            return self.newest(seed, connection.master(self._seeds.name))

    def replaced(self, address: Address) -> bool:
        """Whether another server is the master now."""
        master = self._master
        return master is not None and master.address != address

    def follow(self) -> None:
        """Ask every second from now on, on a thread that ends with this object. After a fork it is started again."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                arguments = weakref.ref(self), self._seeds, self._options
                self._thread = threading.Thread(
                    target=_follow, args=arguments, name="redis-master", daemon=True
                )
                self._thread.start()

    def newest(self, seed: Address, answer: Master) -> Address:
        """Take the answer of the Sentinel `seed`; return the address of the master to use.

        It is the one with the highest epoch, unless most Sentinels have named another one for OUTVOTED_SECONDS.
        """
        with self._lock:
            now = time.monotonic()
            self._answers[seed] = answer, now
            before, known = self._master, self._believed(seed, answer, now)
            if before is not None and before.address != known.address:
                log.info("the Sentinels name another Redis master: %s", known.address)
                self._outvoted_since = None
            if answer.address == known.address:
                self._doubted.discard(seed)
            if answer == known or known != before:
                self._confirmed = now
            self._master = known
            return known.address

    def _believed(self, seed: Address, answer: Master, now: float) -> Master:
        known = self._master
        unconfirmed_seconds = OUTVOTED_SECONDS if seed in self._doubted else CONFIRM_SECONDS
        if known is None or now - self._confirmed > unconfirmed_seconds:
            return answer
        other = self._named_by_most(now)
        if other is None or other.address == known.address:
            self._outvoted_since = None
        elif self._outvoted_since is None:
            self._outvoted_since = now
        elif now - self._outvoted_since >= OUTVOTED_SECONDS:
            self._doubted |= {
                one for one, (last, _) in self._answers.items() if last.address == known.address
            }
            return other
        return answer if answer.epoch > known.epoch and seed not in self._doubted else known

    def _named_by_most(self, now: float) -> Master | None:
        """The master that more than half of the Sentinels have named lately; None if there is no such."""
        count = len(self._seeds.addresses)
        lately = [last for last, at in self._answers.values() if at >= now - _FRESH_SECONDS * count]
        address, votes = Counter(one.address for one in lately).most_common(1)[0]
        return max(one for one in lately if one.address == address) if 2 * votes > count else None


_shared: weakref.WeakValueDictionary[Any, Sentinels] = weakref.WeakValueDictionary()
_making = threading.Lock()


def sentinels_of(seeds: Seeds, options: Mapping[str, Any]) -> Sentinels:
    """The object that these seeds and connection options share. It lives as long as one of its users."""
    key = seeds.addresses, seeds.name, repr(sorted(options.items()))
    with _making:
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = Sentinels(seeds, options)
        return found


class _SentinelConnection:
    """A connection to one Sentinel."""

    def __init__(self, seed: Address, options: Mapping[str, Any]):
        self.seed = seed
        self._sentinel = Sentinel([seed], sentinel_kwargs=options)  # type: ignore[no-untyped-call]
        self._max_seconds = 2 * options["socket_timeout"]  # to connect and for the answer

    def master(self, name: str) -> Master:
        """Raises NotFoundError, also for a malformed answer, or redis.RedisError or OSError."""
        try:
            with closed_when_late(self._sentinel.sentinels[0], self._max_seconds):
                state: Any = self._sentinel.sentinels[0].sentinel_masters()
            state = state.get(name)
            if not state or not self._sentinel.check_master_state(state, name):  # type: ignore[no-untyped-call]
                raise NotFoundError("no live master of this name")
            address = Address.checked(str(state["ip"]), int(state["port"]))
            return Master(address, int(state.get("config-epoch", 0)))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise NotFoundError(f"its answer is malformed: {type(error).__name__}") from error

    def close(self) -> None:
        for client in self._sentinel.sentinels:
            client.close()


def _follow(of: weakref.ref[Sentinels], seeds: Seeds, options: Mapping[str, Any]) -> None:
    """Ask the Sentinels in turn until no connection needs the object; a reference is held only to deliver an answer."""
    connections = [_SentinelConnection(seed, options) for seed in seeds.addresses]
    try:
        while True:
            time.sleep(POLL_SECONDS * random.uniform(0.75, 1.25))
            if of() is None:
                return
            connections.append(connections.pop(0))
            try:
                answer = connections[-1].master(seeds.name)
            except (redis.RedisError, OSError) as error:
                log.debug("a Sentinel did not name the master: %s", error)
                continue
            if (sentinels := of()) is None:
                return
            sentinels.newest(connections[-1].seed, answer)
            del sentinels
    finally:
        for connection in connections:
            connection.close()
