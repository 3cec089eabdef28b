"""Detects a rank that hangs; its whole worker then counts as hanging.

    rank: sends a beat every RANK_BEAT_SECONDS, from a thread of its own, with its progress through collective operations
    leader: counts a rank as silent since its last beat, since a write to it makes no progress, or since the leader waits
            in a collective operation that the rank has not entered

    silent for     RANK_QUIET_SECONDS:    no beats to routers and no lease renewals, until the rank responds again. Routers
                                          and the registry then apply the same bounds as for a worker that is silent itself
                   LOST_SECONDS:          not healthy for probes and Ray
                   `step_stall_seconds`:  the worker fails and is restarted by its supervisor

A long step in which all ranks compute is no silence. After a rank wakes, its worker rejoins under a new epoch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.errors import InternalError
from cluster.protocol.times import LOST_SECONDS, RANK_QUIET_SECONDS
from engine.parallel.group import Arrivals

log = logging.getLogger(__name__)
POLL_SECONDS = 0.5
# Between two observations of a busy loop; after a longer one this process was stopped
MAX_PERIOD_SECONDS = 2.0


class WatchedRank(Protocol):
    rank: int

    @property
    def failure(self) -> str:
        """The reason why the rank failed; "" if it has not."""

    def silent_seconds(self, leader: Arrivals) -> float: ...

    def kill(self) -> None: ...


class RankWatch:
    """Watches all ranks of a worker but its leader; a worker with one rank is always healthy."""

    def __init__(self, ranks: Sequence[WatchedRank], leader: Arrivals):
        self._ranks = ranks
        self._leader = leader

    def silent_seconds(self) -> float:
        """The longest current silence of a rank; infinity once one has failed."""
        return max((rank.silent_seconds(self._leader) for rank in self._ranks), default=0.0)

    def prompt(self) -> bool:
        """Whether this worker may send beats and renew its lease."""
        return self.silent_seconds() < RANK_QUIET_SECONDS

    def healthy(self) -> bool:
        return self.silent_seconds() < LOST_SECONDS

    def kill_silent(self, seconds: float) -> None:
        """Kill the ranks silent for `seconds` or more, so that collective operations that wait for them fail at once."""
        for rank in self._ranks:
            silent = rank.silent_seconds(self._leader)
            if silent >= seconds:
                if not rank.failure:
                    log.warning("killing rank %d, silent for %.1f s", rank.rank, silent)
                rank.kill()

    def kill_silent_until(
        self, over: threading.Event, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Kill ranks silent for `seconds` until `over` is set. Time in which this process was stopped itself is added."""
        looked = clock()
        while not over.wait(POLL_SECONDS):
            now = clock()
            seconds += max(0.0, now - looked - MAX_PERIOD_SECONDS)
            looked = now
            self.kill_silent(seconds)

    async def run(
        self,
        fail: Callable[[BaseException], None],
        stall_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Run until a rank has failed, or has been silent for `stall_seconds`; then call `fail`.

        The time is the sum of the periods between this loop's observations, each at most MAX_PERIOD_SECONDS: a leader
        that was stopped itself sees only old beats until its reader threads have run again.
        """
        silent: dict[int, float] = {}
        looked = clock()
        while True:
            now = clock()
            passed, looked = min(now - looked, MAX_PERIOD_SECONDS), now
            for rank in self._ranks:
                if rank.failure:
                    return fail(InternalError(rank.failure))
                if rank.silent_seconds(self._leader) < RANK_QUIET_SECONDS:
                    silent.pop(rank.rank, None)
                    continue
                silent[rank.rank] = silent.get(rank.rank, -passed) + passed  # 0 at the first observation
                if silent[rank.rank] >= stall_seconds:
                    return fail(InternalError(f"rank {rank.rank} has been silent for {stall_seconds:.0f} s"))
            await asyncio.sleep(POLL_SECONDS)
