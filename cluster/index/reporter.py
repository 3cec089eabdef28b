"""Reports of a worker's cached prefixes to the index: state, not deltas.

A report says how many leading blocks of a chain the worker holds. Reports are numbered and batched, one batch in flight;
the newest report of a chain replaces a waiting older one. If the registry has no entry for the slot, the worker registers
again and publishes everything under its new slot; entries of the old slot expire.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

import redis

from cluster.index import scripts, slot_keys
from cluster.index.backoff import SlotBackoff
from cluster.index.slot_claim import SlotClaim
from cluster.membership import keys
from cluster.membership.registration import Registration
from cluster.protocol.block_hash import index_keys
from cluster.redis.connect import connect
from cluster.redis.failover import disconnect_after_failover
from cluster.redis.memory import RedisMemory, says_full

log = logging.getLogger(__name__)
BATCH_CHAINS = 64
BATCH_SECONDS = 0.02
RETRY_SECONDS = 0.25
RESYNC_RETRY_SECONDS = 2.0
FULL_SECONDS = 2.0  # until a full Redis is asked again
MAX_WAITING_CHAINS = 10_000
MEMORY_SECONDS = 1.0  # maximum age of the figures about Redis's memory

Chain = tuple[list[bytes], int]  # hashes from the root; number of blocks held


class ChainReporter:
    """`all_chains` returns the whole set after the worker got a new slot; it is called on this object's thread."""

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        model_id: str,
        registration: Registration,
        all_chains: Callable[[], Iterable[Chain]],
        *,
        index_url: str = "",
    ):
        """`index_url`: of a Redis of the index's own, if it has one."""
        self._client = connect(index_url or redis_url)
        self._script = self._client.register_script(scripts.report())
        self._keys = [keys.slot_owners(namespace), keys.sequences(namespace)]
        self._claim: SlotClaim | None = None
        if index_url:
            self._claim = SlotClaim(self._client, namespace)
            self._keys = [slot_keys.owners(namespace), slot_keys.sequences(namespace)]
        self.index_up = True  # the last call was answered
        self._prefix = scripts.prefix(namespace, model_id)
        self._registration = registration
        self._backoff = SlotBackoff()
        self._all_chains = all_chains
        self._waiting: OrderedDict[bytes, Chain] = OrderedDict()
        self._unacknowledged: deque[list[Chain]] = deque()  # batches
        self._sequence = 1  # number of the first of them
        self._wake = threading.Condition()
        self._stopping = False
        self._standing = (0, 0)  # Registration.standing when the last full report began
        self._memory, self._looked = RedisMemory(), -MEMORY_SECONDS
        # Reports or the slot's claim were lost: only a resync makes the index correct again.
        self._stale = False
        self._thread = threading.Thread(target=self._run, name="chain-reporter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def report(self, hashes: list[bytes], held: int) -> None:
        """Queue a report. Thread-safe, never blocks."""
        if not hashes:
            return
        with self._wake:
            # A longer report of the same chain replaces the shorter one it extends.
            self._waiting.pop(hashes[-1], None)
            self._waiting[hashes[-1]] = (hashes, held)
            if len(self._waiting) > MAX_WAITING_CHAINS:
                self._waiting.clear()
                self._stale = True
            self._wake.notify()

    @property
    def _slot(self) -> int:
        return self._standing[0]

    @property
    def waiting(self) -> int:
        return len(self._waiting) + sum(len(batch) for batch in list(self._unacknowledged))

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(5.0)
        if self._claim is not None:
            self._claim.release()
        self._client.close()

    def _run(self) -> None:
        while not self._stopping:
            if not self._wait():
                continue
            try:
                ready = self._resync_if_new_slot()
                if ready:
                    self._send_batch()
            except redis.RedisError as error:
                self._answered(error)
                disconnect_after_failover(self._client, error)
                self._pause(FULL_SECONDS if says_full(error) else RETRY_SECONDS)
            except Exception as error:  # the engine did not answer in time, or has ended
                log.warning("reports of cached prefixes wait: %r", error)
                self._pause(RESYNC_RETRY_SECONDS)
            else:
                self._answered(None)
                # The rest of a resync is sent at once; ordinary reports wait to be batched.
                self._pause(RETRY_SECONDS if not ready else 0.0 if self._unacknowledged else BATCH_SECONDS)

    def _answered(self, error: redis.RedisError | None) -> None:
        if error is None and not self.index_up:
            log.info("reports of cached prefixes reach Redis again")
        elif error is not None:
            # Where it shares the registry's Redis, the registration logs that as well.
            level = logging.WARNING if self.index_up and self._claim is not None else logging.DEBUG
            log.log(level, "reports of cached prefixes wait for Redis: %s", error)
        self.index_up = error is None

    def _wait(self) -> bool:
        with self._wake:
            # Without a slot no report can be sent: each would end the wait below at once
            if self._registration.slot == 0:
                self._wake.wait_for(lambda: self._stopping, RETRY_SECONDS)
                return False
            if not (self._waiting or self._unacknowledged or self._stopping):
                self._wake.wait(RETRY_SECONDS)
            return (
                bool(self._waiting or self._unacknowledged)
                or self._standing != self._registration.standing
                or self._stale
                or (self._claim is not None and self._claim.due)
            )

    def _pause(self, seconds: float) -> None:
        with self._wake:
            if not self._stopping:
                self._wake.wait_for(lambda: self._stopping, seconds)

    def _resync_if_new_slot(self) -> bool:
        """Publish everything under a new slot, if there is one. Returns False while a new slot is needed and missing."""
        if self._standing == self._registration.standing:
            if self._claim is not None and not self._claim.keep():
                self._stale = True
            self._stay_above()
            if not self._stale:
                return True
            self._ask_slot()
            if self._standing == self._registration.standing:
                return False
        standing = self._registration.standing
        # If the full report fails, all of this is repeated, the claim included.
        if self._claim is not None and not self._claim.claim(
            standing[0], self._registration.name, standing[1]
        ):
            self._ask_slot()
            return False
        self._stale = False
        chains = list(self._all_chains())
        self._unacknowledged = deque(
            chains[i : i + BATCH_CHAINS] for i in range(0, len(chains), BATCH_CHAINS)
        )
        self._standing, self._sequence = standing, 1
        return True

    def _ask_slot(self) -> None:
        self._stay_above()
        if self._backoff.may_ask() and self._registration.register_again():
            self._backoff.asked()

    def _stay_above(self) -> None:
        if self._claim is not None:
            self._registration.stay_above(self._claim.highest)

    def _send_batch(self) -> None:
        """Send the oldest batch that Redis has not acknowledged.

        After a lost answer the same batch is sent under the same number: the index would discard any other batch under
        that number as a repetition.
        """
        if not self._unacknowledged:
            with self._wake:
                count = min(BATCH_CHAINS, len(self._waiting))
                batch = [self._waiting.popitem(last=False)[1] for _ in range(count)]
            if not batch:
                return
            self._unacknowledged.append(batch)
        batch = self._unacknowledged[0]
        del batch[: self._send(batch)]
        if not batch:
            self._unacknowledged.popleft()

    def _look_at_memory(self) -> RedisMemory:
        if time.monotonic() - self._looked > MEMORY_SECONDS:
            self._looked = time.monotonic()
            with contextlib.suppress(redis.ResponseError):  # the Redis user may lack +info
                self._memory = RedisMemory.of(self._client.info("memory"))
        return self._memory

    def _send(self, chains: list[Chain]) -> int:
        """Send one batch. Returns how many of its chains the index has taken; the rest is sent under the same number.

        0: everything must be published again under a new slot."""
        arguments: list[bytes | str | int] = [
            self._prefix,
            self._slot,
            self._claim.owner if self._claim is not None else self._registration.name,
            self._sequence,
            int(self._look_at_memory().shortened(scripts.NODE_TTL_SECONDS) * 1000),
        ]
        for hashes, held in chains:
            arguments += [held, index_keys(hashes)]
        answer = self._script(keys=self._keys, args=arguments)
        if answer == b"ok":
            self._sequence += 1
            return len(chains)
        if isinstance(answer, list):
            return int(answer[0])
        self._stale = True  # the slot is not registered, or batches were lost
        return 0
