"""All links of a router process, and which workers are suspect.

Every link carries a beat each 0.5 s. A worker that is silent for 2 s is suspect and gets no new requests; after 5 s it is
lost, with all its attempts. A lost worker is excluded until its link is up again, or for the time of
router/link/backoff.py if that is longer: during a partition only the first request should wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from cluster.errors import PeerLostError
from cluster.faults.points import NO_FAULTS, Faults
from cluster.membership.types import WorkerInfo
from cluster.process.standstill import STOPPED_SECONDS
from cluster.protocol.link import STATUS_SECONDS, common_version
from cluster.protocol.times import BEAT_SECONDS, LOST_SECONDS, SUSPECT_SECONDS
from cluster.security.tls import Peers
from router.link.backoff import Backoff
from router.link.handle import LinkHandle, Reader
from router.link.identity import RouterIdentity
from router.link.link import WorkerLink
from router.link.state import LinkState

log = logging.getLogger(__name__)
TICK_SECONDS = 0.1


def no_message(seconds: float) -> PeerLostError:
    return PeerLostError(f"no message received for {seconds:.0f} s")


class Links:
    """One link per epoch of a worker, opened by its first handle or by `keep_only`."""

    def __init__(self, router_id: str, peers: Peers | None = None, faults: Faults = NO_FAULTS):
        """`peers` has the certificates; default: plain text."""
        self._identity = RouterIdentity(router_id, faults)
        self._peers = peers or Peers()
        self._links: dict[str, WorkerLink] = {}  # by worker_id@epoch
        self._lost: Backoff[str] = Backoff(time.monotonic)
        self._unreached: set[str] = set()  # names of workers that the last call did not reach
        self._timer: asyncio.TimerHandle | None = None
        self._due = self._beat_at = self._status_at = 0.0
        self._closing: set[asyncio.Task[None]] = set()

    def open(self, worker: WorkerInfo, reader: Reader) -> LinkHandle:
        """A handle for an attempt at the worker; its link is opened if there is none."""
        return self._link(worker).open(reader)

    def keep_only(self, workers: Iterable[WorkerInfo]) -> None:
        """Open links to new workers; close those to workers that are gone. A worker that is missing in the registry alone
        may still send: its link stays while it has attempts."""
        known = {worker.name: worker for worker in workers}
        for name, worker in known.items():
            if name not in self._links and common_version(worker.link_min_version, worker.link_max_version):
                self._link(worker)
        for name in [name for name, link in self._links.items() if name not in known and link.idle]:
            task = asyncio.get_running_loop().create_task(self._links.pop(name).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._unreached &= self._links.keys()
        version = self._peers.version
        for link in self._links.values():
            if link.certificates != version:
                link.move()

    def not_reached(self, name: str) -> None:
        """Record a call that did not reach the worker: it extends an exclusion. One is too little to begin one; two with
        none between that did do, or each request would try a worker of which a firewall lets the link through alone."""
        if name in self._unreached:
            self._lost.failed(name)
        else:
            self._lost.failed_again(name)
            self._unreached.add(name)

    def reached(self, name: str) -> None:
        """Record a call that the worker has answered."""
        self._unreached.discard(name)

    @property
    def suspects(self) -> frozenset[str]:
        """Names of workers that are silent for more than SUSPECT_SECONDS, or lost, or in back-off."""
        silent = [
            name
            for name, link in self._links.items()
            if link.is_lost or link.silent_seconds > SUSPECT_SECONDS
        ]
        return self._lost.names().union(silent)

    def silent(self) -> int:
        """The number of workers that are suspect by their silence. Any thread."""
        return sum(link.silent_seconds > SUSPECT_SECONDS for link in list(self._links.values()))

    def up(self) -> int:
        """The number of links that are up. Any thread."""
        return sum(link.state is LinkState.UP for link in list(self._links.values()))

    def unread(self) -> int:
        """Count of tokens and ends for attempts that are no longer read. Any thread."""
        return self._identity.unread

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*self._closing, *(link.close() for link in self._links.values()))
        self._links.clear()

    def _link(self, worker: WorkerInfo) -> WorkerLink:
        name = worker.name
        link = self._links.get(name)
        if link is None:
            link = self._links[name] = WorkerLink(
                worker,
                self._identity,
                self._peers,
                lost=lambda: self._on_lost(name),
                answered=lambda: self._lost.answered(name),
            )
            if self._timer is None:
                self._tick_later()
        return link

    def _on_lost(self, name: str) -> None:
        self._lost.failed(name)

    def _tick_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + TICK_SECONDS
        self._timer = loop.call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        now = asyncio.get_running_loop().time()
        late = now - self._due
        beats, asks = now >= self._beat_at, now >= self._status_at
        if beats:
            self._beat_at = now + BEAT_SECONDS
        if asks:
            self._status_at = now + STATUS_SECONDS
        for link in list(self._links.values()):
            try:
                self._tend(link, late, beats=beats, asks=asks)
            except Exception:  # without further ticks no link beats, and every worker cuts its own
                log.exception("beat and checks of the link to %s failed; retrying", link.worker.name)
        self._tick_later()

    @staticmethod
    def _tend(link: WorkerLink, late: float, *, beats: bool, asks: bool) -> None:
        """`late`: seconds by which the tick is."""
        # Late: what has come since the loop's last turn is unread, and that turn may have been a tick before this was due.
        lost_seconds = LOST_SECONDS + (TICK_SECONDS if late > TICK_SECONDS else 0.0)
        if late > STOPPED_SECONDS:
            link.restart_clocks()
        elif late > TICK_SECONDS:
            link.allow_delay(late)
        if link.silent_seconds > lost_seconds:
            link.give_up(no_message(LOST_SECONDS))
        if beats:
            link.beat()
        if asks:
            link.ask(STATUS_SECONDS)
