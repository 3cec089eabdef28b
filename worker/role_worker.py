"""A running worker as `baton` and the Ray pools see it, whatever its role."""

from __future__ import annotations

from typing import Any, Protocol

from worker.attempts import Attempts
from worker.core import WorkerCore


class HandoffSide(Protocol):
    """The worker's end of hand-offs: sender or receiver."""

    async def rejoin(self, worker: Any) -> None: ...

    async def close(self) -> None: ...


class RoleWorker:
    def __init__(self, core: WorkerCore, attempts: Attempts[Any], side: HandoffSide):
        self._core = core
        self._attempts = attempts
        self._side = side
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

    def healthy(self) -> bool:
        return self._core.host.healthy() and not self._core.failed.done()

    async def wait_failed(self) -> BaseException:
        return await self._core.failed

    async def start(self) -> None:
        await self._core.start()

    async def stop(self) -> None:
        """Finishes what runs, within the drain limit, then leaves."""
        await self._core.drain(self._idle)
        await self._attempts.close()
        await self._side.close()
        await self._core.stop()

    def _idle(self) -> bool:
        return len(self._attempts) == 0

    async def _fenced(self) -> None:
        """Others have gone on without this worker: nothing that it still does is wanted."""
        await self._attempts.cancel_all()
        await self._side.rejoin(self._core.ref)
