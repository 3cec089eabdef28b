"""Faults of a Redis as it is in production: behind Sentinels, or as a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from redis.exceptions import RedisError

from cluster.redis.urls import seeds_of
from tests.chaos.rows import Fault
from tests.harness.redis_servers import (
    MAX_MEMORY,
    POLICY,
    RedisCluster,
    SentinelGroup,
    client,
    run_cluster,
    run_sentinels,
)
from tests.harness.waiting import wait_for

DOWN_SECONDS = 4.0  # a slow master is no dead one
ANSWERS_SECONDS = 0.1  # between two waits of a slow one
PROMOTED_SECONDS = 60.0
TOO_LITTLE = 1 << 20  # bytes: less than an empty server uses
Servers = SentinelGroup | RedisCluster


@contextlib.contextmanager
def run_redis(kind: str, directory: Path) -> Iterator[Servers | None]:
    """`kind`: sentinels, cluster, or "" for the one that `baton up` starts."""
    if kind == "sentinels":
        with run_sentinels(directory, DOWN_SECONDS) as group:
            yield group
    elif kind == "cluster":
        with run_cluster(directory) as cluster:
            yield cluster
    else:
        yield None


class RedisFaults:
    """`url`: that of the cluster under test, with its hash tag."""

    def __init__(self, servers: Servers, url: str):
        self._servers = servers
        seeds = seeds_of(url)
        self._namespace = seeds.name if seeds is not None else ""

    async def inject(self, fault: Fault) -> float:
        """Returns after its end; for how many seconds it was held."""
        acts = {
            "promote": self._promote,
            "fill": self._fill,
            "empty": self._empty,
            "slow": self._slow,
            "freeze": self._freeze,
            "move": lambda fault: self._move(keys=True),
            "move without keys": lambda fault: self._move(keys=False),
        }
        began = time.monotonic()
        await asyncio.to_thread(acts[fault.row.act], fault)
        return time.monotonic() - began

    def settle(self) -> None:
        if isinstance(self._servers, SentinelGroup):
            self._servers.wait_settled()

    def _port(self) -> int:
        """Of the server that has the keys."""
        if isinstance(self._servers, SentinelGroup):
            return self._servers.master()
        return self._servers.owner(self._namespace)

    def _promote(self, fault: Fault) -> None:
        """Kill the master; it comes back as a replica."""
        assert isinstance(self._servers, SentinelGroup)
        group, old = self._servers, self._servers.master()
        group.servers[old].kill()
        try:
            wait_for(lambda: group.master() != old, PROMOTED_SECONDS, "a replica is promoted")
        finally:
            group.servers[old].start()

    def _fill(self, fault: Fault) -> None:
        """Far above its limit, and it may evict nothing."""
        with client(self._port()) as server:
            server.config_set("maxmemory-policy", "noeviction")
            server.config_set("maxmemory", TOO_LITTLE)
            try:
                time.sleep(fault.hold_seconds)
            finally:
                server.config_set("maxmemory", MAX_MEMORY)
                server.config_set("maxmemory-policy", POLICY)

    def _empty(self, fault: Fault) -> None:
        with client(self._port()) as server:
            server.flushall()

    def _slow(self, fault: Fault) -> None:
        """Whatever arrives waits for 1 to 3 s.

        Between two waits it answers: Sentinels would take it for dead if a ping had to wait for the second one as well.
        """
        end = time.monotonic() + fault.hold_seconds
        with client(self._port()) as server:
            while time.monotonic() < end:
                with contextlib.suppress(RedisError):
                    server.execute_command("DEBUG", "SLEEP", fault.rng.uniform(1.0, 3.0))
                time.sleep(ANSWERS_SECONDS)

    def _freeze(self, fault: Fault) -> None:
        server = self._servers.servers[self._port()]
        os.kill(server.pid, signal.SIGSTOP)
        try:
            time.sleep(fault.hold_seconds)
        finally:
            os.kill(server.pid, signal.SIGCONT)

    def _move(self, *, keys: bool) -> None:
        assert isinstance(self._servers, RedisCluster)
        self._servers.move_slot(self._namespace, keys=keys)
