"""A running worker as `baton` and the Ray pools see it, whatever its role."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from cluster.errors import BatonError
from cluster.membership.status import WorkerStatus
from cluster.membership.types import Then
from worker.attempts import Attempts
from worker.core import WorkerCore
from worker.drain import Leaving, drain

log = logging.getLogger(__name__)
CLOSE_SECONDS = 15.0


class HandoffSide(Protocol):
    """The worker's end of hand-offs: sender or receiver."""

    async def rejoin(self, worker: Any) -> None: ...

    async def close(self) -> None: ...


class RoleWorker:
    def __init__(self, core: WorkerCore, role: Leaving, attempts: Attempts[Any], side: HandoffSide):
        self._core = core
        self._leaving = role
        self._attempts = attempts
        self._side = side
        self._draining: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        core.on_failed = role.failed
        core.on_fenced = self._fenced

    @property
    def worker_id(self) -> str:
        return self._core.worker_id

    @property
    def epoch(self) -> int:
        return self._core.epoch

    @property
    def address(self) -> str:
        return self._core.server.address

    @property
    def metrics_address(self) -> str:
        return self._core.metrics_address

    def status(self) -> WorkerStatus:
        """What it publishes of itself."""
        return self._core.published_status()

    def healthy(self) -> bool:
        return self._core.host.healthy() and not self._core.failed.done()

    async def wait_failed(self) -> BaseException:
        return await self._core.failed

    async def wait_drain_wanted(self) -> Then:
        """Returns when `baton drain` names this worker."""
        return await asyncio.shield(self._core.drain_wanted)

    async def start(self) -> None:
        await self._core.start()

    async def stop(self) -> None:
        """Finishes what runs, within the drain limit, gives back the rest, then leaves. Once, however often asked."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if self._core.failed.done():
            await self._core.cut_off()
        await self._try_to_drain()
        await self._core.end_silent_ranks()
        deadline = asyncio.get_running_loop().time() + CLOSE_SECONDS
        for close in (self._attempts.close, self._side.close):
            try:
                async with asyncio.timeout_at(deadline):
                    await close()
            except TimeoutError:
                log.error("closing %s took longer than %.0f s; exiting anyway", self.worker_id, CLOSE_SECONDS)
            except BatonError as error:  # the engine has failed: there is nothing to give back
                log.warning("closing %s failed, exiting anyway: %s", self.worker_id, error)
            except Exception:  # a defect; what follows still has to be closed
                log.exception("closing %s failed, exiting anyway", self.worker_id)
        await self._core.stop()

    async def _try_to_drain(self) -> None:
        try:
            await self.drain()
        except BatonError as error:  # the engine failed meanwhile: what is left is cut off below
            log.warning("draining ended early: %s", error)
        except Exception:  # the lease of a worker that did not deregister runs out by itself
            log.exception("draining ended early")

    async def drain(self) -> None:
        """Once too: whoever asks later, by another way, joins in; the limits count from the first."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        await asyncio.shield(self._draining)

    async def _drain(self) -> None:
        core = self._core
        await core.start_draining()
        await drain(
            self._leaving,
            healthy=core.host.healthy,
            has_successor=core.has_successor,
            migrate_seconds=core.config.drain_migrate_seconds,
            drain_seconds=core.config.drain_seconds,
        )

    async def leave(self, error: BaseException) -> None:
        """For a reason only a new process can mend: drains, then ends as failed, so that it is started again."""
        await self.drain()
        self._core.fail(error)

    async def _fenced(self) -> None:
        """Others have gone on without this worker: nothing that it still does is wanted."""
        await self._attempts.cancel_all()
        await self._side.rejoin(self._core.ref)
