"""A worker tells the index which prefixes it holds: state, not deltas.

"Of this chain I hold the first c blocks." Reports are batched, one batch in flight, numbered; the newest report of
a chain replaces a waiting older one. When the registry no longer knows the slot, the worker registers again and
publishes everything under its new slot; what the old one held goes stale by itself.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

import redis

from cluster.block_hash import index_keys
from cluster.index import scripts
from cluster.membership import keys
from cluster.membership.registration import Registration
from cluster.redis.connect import connect

log = logging.getLogger(__name__)
BATCH_CHAINS = 64
BATCH_SECONDS = 0.02
RETRY_SECONDS = 0.25
MAX_WAITING_CHAINS = 10_000

Chain = tuple[list[bytes], int]  # hashes from the root, held


class ChainReporter:
    """`all_chains` is asked for the whole set after the worker got a new slot; it runs on our thread."""

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        model_id: str,
        registration: Registration,
        all_chains: Callable[[], Iterable[Chain]],
    ):
        self._client = connect(redis_url)
        self._script = self._client.register_script(scripts.report())
        self._keys = [keys.slot_owners(namespace), scripts.sequences(namespace)]
        self._prefix = scripts.prefix(namespace, model_id)
        self._registration = registration
        self._all_chains = all_chains
        self._waiting: OrderedDict[bytes, Chain] = OrderedDict()
        self._wake = threading.Condition()
        self._stopping = False
        self._slot = 0
        self._sequence = 1
        self._dropped = False  # the queue ran over: only a resync makes the index true again
        self._thread = threading.Thread(target=self._run, name="chain-reporter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def report(self, hashes: list[bytes], held: int) -> None:
        """Any thread; returns at once."""
        if not hashes:
            return
        with self._wake:
            # A longer report of the same chain replaces the shorter one it extends.
            self._waiting.pop(hashes[-1], None)
            self._waiting[hashes[-1]] = (hashes, held)
            if len(self._waiting) > MAX_WAITING_CHAINS:
                self._waiting.clear()
                self._dropped = True
            self._wake.notify()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._client.close()

    def _run(self) -> None:
        while not self._stopping:
            if not self._wait():
                continue
            try:
                self._resync_if_new_slot()
                self._send_batch()
            except redis.RedisError as error:
                log.debug("reports wait for Redis: %s", error)
                self._pause(RETRY_SECONDS)
            else:
                self._pause(BATCH_SECONDS)

    def _wait(self) -> bool:
        with self._wake:
            if not self._waiting and not self._stopping:
                self._wake.wait(RETRY_SECONDS)
            return self._registration.slot != 0 and (
                bool(self._waiting) or self._slot != self._registration.slot or self._dropped
            )

    def _pause(self, seconds: float) -> None:
        with self._wake:
            if not self._stopping:
                self._wake.wait_for(lambda: self._stopping, seconds)

    def _resync_if_new_slot(self) -> None:
        if self._dropped:
            self._registration.register_again()
            self._dropped = False
        if self._slot == self._registration.slot:
            return
        self._slot = self._registration.slot
        self._sequence = 1
        chains = list(self._all_chains())
        for begin in range(0, len(chains), BATCH_CHAINS):
            self._send(chains[begin : begin + BATCH_CHAINS])

    def _send_batch(self) -> None:
        with self._wake:
            batch = [self._waiting.popitem(last=False) for _ in range(min(BATCH_CHAINS, len(self._waiting)))]
        try:
            self._send([chain for _, chain in batch])
        except redis.RedisError:
            with self._wake:
                for key, chain in reversed(batch):
                    if key not in self._waiting:
                        self._waiting[key] = chain
                        self._waiting.move_to_end(key, last=False)
            raise

    def _send(self, chains: list[Chain]) -> None:
        if not chains:
            return
        arguments: list[bytes | str | int] = [
            self._prefix,
            self._slot,
            self._registration.name,
            self._sequence,
            int(scripts.NODE_TTL_SECONDS * 1000),
        ]
        for hashes, held in chains:
            arguments += [held, index_keys(hashes)]
        answer = self._script(keys=self._keys, args=arguments)
        if answer == b"ok":
            self._sequence += 1
        elif answer == b"register":
            self._registration.register_again()
        else:  # batches were lost: say everything again, under a new slot
            self._registration.register_again()
