"""Whether every process of a worker is at work: a rank that hangs is the worker's failure, as if its leader hung.

    rank: a beat each 0.15 s, from a thread of its own, with how far its plans have come
    leader: a rank is silent since its last beat, since a write to it does not progress, or since the leader waits at an
            operation of the group that the rank has not come to

    silent for     0.5 s:  no beats to routers, no lease renewals, until it is heard again; so routers and the registry
                           come to the same verdict, within the same bounds, as on a worker that is silent itself
                   5 s:    not healthy, as its probes and Ray see it
                   `step_stall_seconds`: the worker fails, and is started again by whoever keeps it

A long step in which all ranks compute is none of that. A rank that wakes makes its worker rejoin under a new epoch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.errors import InternalError
from engine.parallel.group import Arrivals

QUIET_SECONDS = 0.5  # three beats
LOST_SECONDS = 5.0
LOOK_SECONDS = 0.5


class WatchedRank(Protocol):
    rank: int

    @property
    def failure(self) -> str:
        """Empty while there is none."""

    def silent_seconds(self, leader: Arrivals) -> float: ...

    def kill(self) -> None: ...


class RankWatch:
    """Over the further ranks of one worker; without any, all is well."""

    def __init__(self, ranks: Sequence[WatchedRank], leader: Arrivals):
        self._ranks = ranks
        self._leader = leader

    def silent_seconds(self) -> float:
        """Of the rank that has been silent longest; infinity once one has failed."""
        return max((rank.silent_seconds(self._leader) for rank in self._ranks), default=0.0)

    def prompt(self) -> bool:
        """Whether this worker may say that it is alive."""
        return self.silent_seconds() < QUIET_SECONDS

    def healthy(self) -> bool:
        return self.silent_seconds() < LOST_SECONDS

    def kill_silent(self, seconds: float) -> None:
        """Ends the ranks that have been silent for so long: what waits for them in an operation of the group, the
        engine's thread first of all, fails at once."""
        for rank in self._ranks:
            if rank.silent_seconds(self._leader) >= seconds:
                rank.kill()

    async def run(
        self,
        fail: Callable[[BaseException], None],
        patience_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Until a rank has failed, or has been silent for `patience_seconds`.

        That time is counted from our own looks: a leader that was stopped itself finds old beats only, until the
        threads that listen have run again.
        """
        since: dict[int, float] = {}
        while True:
            for rank in self._ranks:
                if rank.failure:
                    return fail(InternalError(rank.failure))
                if rank.silent_seconds(self._leader) < QUIET_SECONDS:
                    since.pop(rank.rank, None)
                elif clock() - since.setdefault(rank.rank, clock()) >= patience_seconds:
                    return fail(
                        InternalError(f"rank {rank.rank} has not answered for {patience_seconds:.0f} s")
                    )
            await asyncio.sleep(LOOK_SECONDS)
