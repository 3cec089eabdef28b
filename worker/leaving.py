"""Drains and stops a worker, each once however often it is asked."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from cluster.config.worker import WorkerConfig
from cluster.errors import BatonError
from worker.drain import drain
from worker.role import Role

log = logging.getLogger(__name__)
CLOSE_SECONDS = 15.0


class LeavingSteps(Protocol):
    """The worker that leaves."""

    @property
    def has_failed(self) -> bool: ...

    def engine_healthy(self) -> bool: ...

    async def has_successor(self) -> bool:
        """Whether another worker could continue this one's requests."""

    async def start_draining(self) -> None:
        """Take nothing new; probes, gRPC health and the registry report it."""

    async def cut_off(self) -> None:
        """End all streams of a failed worker."""

    async def end_silent_ranks(self) -> None: ...

    async def close(self) -> None:
        """Leave the registry and end everything that runs."""


class Leaving:
    def __init__(self, config: WorkerConfig, worker: LeavingSteps, role: Role):
        self._config = config
        self._worker = worker
        self._role = role
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
        await self._worker.start_draining()
        await drain(
            self._role,
            self._config.worker_id,
            healthy=self._worker.engine_healthy,
            has_successor=self._worker.has_successor,
            migrate_seconds=self._config.drain_migrate_seconds,
            drain_seconds=self._config.drain_seconds,
        )

    async def _stop(self) -> None:
        if self._worker.has_failed:
            await self._worker.cut_off()
        await self._try_to_drain()
        await self._worker.end_silent_ranks()
        await self._close_role()
        await self._worker.close()

    async def _try_to_drain(self) -> None:
        try:
            await self.drain()
        except BatonError as error:  # the engine failed meanwhile: what is left is cut off below
            log.warning("%s: the drain ended early: %s", self._config.worker_id, error)
        except Exception:  # the lease of a worker that did not deregister runs out by itself
            log.exception("%s: the drain ended early", self._config.worker_id)

    async def _close_role(self) -> None:
        worker_id = self._config.worker_id
        deadline = asyncio.get_running_loop().time() + CLOSE_SECONDS
        for close in self._role.closers():
            try:
                async with asyncio.timeout_at(deadline):
                    await close()
            except TimeoutError:
                log.error("%s: closing took longer than %.0f s; exiting anyway", worker_id, CLOSE_SECONDS)
            except BatonError as error:  # the engine has failed: it holds nothing to free
                log.warning("%s: closing failed, exiting anyway: %s", worker_id, error)
            except Exception:  # a defect; what follows still has to be closed
                log.exception("%s: closing failed, exiting anyway", worker_id)
