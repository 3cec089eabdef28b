"""Finds the server that has a deployment's keys: the master that Sentinels name, or the cluster's node of their slot.

redis-py asks and judges the answers. Every connection asks anew, so that one that was closed after a failover leads to the
new server; one that is open is closed before its next call once the Sentinels name another master.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry
from redis.utils import str_if_bytes

from cluster.errors import ConfigError
from cluster.redis.deadline import closed_when_late
from cluster.redis.sentinels import NotFoundError, sentinels_of
from cluster.redis.urls import Address, Seeds

FIND_SECONDS = 2.0  # with a connection and a call it stays below a worker's lease
ASK_SECONDS = 1.5  # for an answer of one seed
HEAD_START_SECONDS = 0.3  # of each seed before the next one is asked as well
FRESH_SECONDS = 2.0  # a server found for a caller that had given up


class Finder:
    def __init__(self, seeds: Seeds):
        """Raises ConfigError if the URL is a cluster's without a hash tag, or has an unknown option."""
        if seeds.kind == "cluster" and not seeds.name:
            raise ConfigError(
                "a redis+cluster:// URL needs the hash tag of the keys: ?hash_tag=NAMESPACE",
                field="redis_url",
            )
        self._seeds = seeds
        self._first = 0  # the seed to ask first
        self._options = {
            **seeds.ask_options,
            "socket_timeout": ASK_SECONDS,
            "socket_connect_timeout": ASK_SECONDS,
            "driver_info": None,
        }
        try:
            redis.Redis(**self._options).close()
        except TypeError:  # the message leaves its name out, which may be part of a password
            raise ConfigError(
                "redis_url has an option that Redis clients do not know", field="redis_url"
            ) from None
        self._sentinels = sentinels_of(seeds, self._options) if seeds.kind == "sentinel" else None
        self._ask = self._ask_node if self._sentinels is None else self._sentinels.ask
        self._finding: asyncio.Future[tuple[Address, float]] | None = None

    def find(self) -> Address:
        """The server's address, by the seed that answers first. Blocks for FIND_SECONDS at most; raises NotFoundError.

        The seeds take turns to be asked first: one whose view is old does not answer every time.
        """
        if self._sentinels is not None:
            self._sentinels.follow()
        addresses = self._seeds.addresses
        order = [*addresses[self._first :], *addresses[: self._first]]
        self._first = (self._first + 1) % len(addresses)
        deadline = time.monotonic() + FIND_SECONDS
        reasons: list[str] = []
        pool = ThreadPoolExecutor(len(order), thread_name_prefix="redis-finder")
        try:
            asked: dict[Future[Address], Address] = {}
            for seed in order:
                asked[pool.submit(self._ask, seed)] = seed
                left = max(0.0, deadline - time.monotonic())
                if found := _answered(asked, min(HEAD_START_SECONDS, left), reasons):
                    return found
            while asked and (left := deadline - time.monotonic()) > 0:
                if found := _answered(asked, left, reasons):
                    return found
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        reasons += [f"{seed} does not answer" for seed in asked.values()]
        what = "the master" if self._seeds.kind == "sentinel" else "the slot's node"
        raise NotFoundError(f"{what} of {self._seeds.name!r} is unknown: {'; '.join(reasons)}")

    def replaced(self, address: Address) -> bool:
        """Whether the Sentinels name another master now. Always False in a cluster, whose nodes answer MOVED."""
        return self._sentinels is not None and self._sentinels.replaced(address)

    async def find_async(self) -> Address:
        """`find`, off the event loop. Concurrent callers share a search; it goes on if all of them give up, and serves the
        next one."""
        if self._finding is None or not self._usable(self._finding):
            self._finding = self._in_thread()
            self._finding.add_done_callback(_retrieved)
        search = self._finding
        address, _ = await asyncio.shield(search)
        if self._finding is search:
            self._finding = None
        return address

    def _in_thread(self) -> asyncio.Future[tuple[Address, float]]:
        """Search on a thread of its own: while all seeds are silent, searches would fill the few that resolve names."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="redis-search")
        try:
            return asyncio.get_running_loop().run_in_executor(pool, self._find_at)
        finally:
            pool.shutdown(wait=False)

    def _find_at(self) -> tuple[Address, float]:
        return self.find(), time.monotonic()

    @staticmethod
    def _usable(search: asyncio.Future[tuple[Address, float]]) -> bool:
        if not search.done():
            return True
        if search.cancelled() or search.exception() is not None:
            return False
        return time.monotonic() - search.result()[1] < FRESH_SECONDS

    def _ask_node(self, seed: Address) -> Address:
        """Raises NotFoundError, also for a malformed answer."""
        node = redis.Redis(*seed, retry=Retry(NoBackoff(), 0), **self._options)
        seconds = 2 * float(self._options["socket_timeout"])  # to connect and for the answer
        try:
            with contextlib.closing(node), closed_when_late(node, seconds):
                answer = node.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            owner = _owner(answer, key_slot(f"{{{self._seeds.name}}}".encode()), seed)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise NotFoundError(f"its answer is malformed: {type(error).__name__}") from error
        except (redis.RedisError, OSError) as error:
            raise NotFoundError(f"CLUSTER SLOTS failed (the user needs +cluster|slots): {error}") from error
        if owner is None:
            raise NotFoundError("no node serves the slot")
        return owner


def _owner(answer: Any, slot: int, asked: Address) -> Address | None:
    """The primary of `slot`. `answer`: [[first slot, last slot, [host, port, …] of the primary, …], …]; an empty host is
    that of the node that was `asked`. Raises TypeError, ValueError or LookupError if the answer has another form."""
    for first, last, primary, *_ in answer:
        if int(first) <= slot <= int(last):
            return Address.checked(str_if_bytes(primary[0] or b"") or asked.host, int(primary[1]))
    return None


def _answered(asked: dict[Future[Address], Address], seconds: float, reasons: list[str]) -> Address | None:
    """Wait until one of those asked has answered; notes why others cannot."""
    for done in wait(asked, seconds, FIRST_COMPLETED).done:
        seed = asked.pop(done)
        error = done.exception()
        if error is None:
            return done.result()
        if not isinstance(error, redis.RedisError | OSError):
            raise error
        reasons.append(f"{seed}: {error}")
    return None


def _retrieved(search: asyncio.Future[tuple[Address, float]]) -> None:
    """Mark its error as retrieved: its callers may all have given up."""
    if not search.cancelled():
        search.exception()
