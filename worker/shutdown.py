"""Drains and stops a worker, each once however often it is asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cluster.config.worker import WorkerConfig
from cluster.errors import BatonError
from worker.drain import drain
from worker.ending import Ending
from worker.health import Health, Phase
from worker.loaded_engine import LoadedEngine
from worker.membership import Membership
from worker.role import Role
from worker.server import WorkerServer

log = logging.getLogger(__name__)
CLOSE_SECONDS = 15.0
LAST_EVENT_SECONDS = 0.25


@dataclass(eq=False)
class Shutdown:
    """`close` ends everything that is left after the role has been closed."""

    config: WorkerConfig
    role: Role
    health: Health
    ending: Ending
    server: WorkerServer
    membership: Membership
    engine: LoadedEngine
    close: Callable[[], Awaitable[None]]

    def __post_init__(self) -> None:
        self._draining: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def drain(self) -> None:
        """Drain. A later call waits for the drain in progress; limits count from the first."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        await asyncio.shield(self._draining)

    async def stop(self) -> None:
        """Finish what runs within the drain limit, return the rest to routers, then leave."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _drain(self) -> None:
        self.health.to(Phase.DRAINING)
        await self.server.set_serving(False)
        await self.membership.set_draining(self.ending.then)
        await drain(
            self.role,
            self.config.worker_id,
            healthy=self.engine.host.healthy,
            has_successor=lambda: self.membership.has_successor(self.role.adapters_held()),
            migrate_seconds=self.config.drain_migrate_seconds,
            drain_seconds=self.config.drain_seconds,
        )

    async def _stop(self) -> None:
        if self.ending.has_failed:  # streams end now, each with its last event, which has the reason
            await self.server.stop(LAST_EVENT_SECONDS)
        await self._try_to_drain()
        await self.engine.end_silent_ranks()
        await self._close_role()
        await self.close()

    async def _try_to_drain(self) -> None:
        try:
            await self.drain()
        except BatonError as error:  # the engine failed meanwhile: what is left is cut off below
            log.warning("%s: the drain ended early: %s", self.config.worker_id, error)
        except Exception:  # the lease of a worker that did not deregister runs out by itself
            log.exception("%s: the drain ended early", self.config.worker_id)

    async def _close_role(self) -> None:
        worker_id = self.config.worker_id
        deadline = asyncio.get_running_loop().time() + CLOSE_SECONDS
        for close in self.role.closers():
            try:
                async with asyncio.timeout_at(deadline):
                    await close()
            except TimeoutError:
                log.error("%s: closing took longer than %.0f s; exiting anyway", worker_id, CLOSE_SECONDS)
            except BatonError as error:  # the engine has failed: it holds nothing to free
                log.warning("%s: closing failed, exiting anyway: %s", worker_id, error)
            except Exception:  # a defect; what follows still has to be closed
                log.exception("%s: closing failed, exiting anyway", worker_id)
