"""Starts the worker of a role: in the foreground (`baton prefill`, `baton decode`) or inside a Ray replica."""

from __future__ import annotations

from typing import Protocol

from baton.processes.uncollected import uncollected
from cluster.config.worker import WorkerConfig
from cluster.membership.status import WorkerStatus
from cluster.membership.types import Then


class RunningWorker(Protocol):
    @property
    def worker_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def address(self) -> str: ...
    @property
    def metrics_address(self) -> str: ...
    def healthy(self) -> bool: ...
    def status(self) -> WorkerStatus: ...
    async def wait_drain_wanted(self) -> Then: ...
    async def wait_failed(self) -> BaseException: ...
    async def stop(self) -> None: ...


async def start_worker(config: WorkerConfig) -> RunningWorker:
    """Load the model and serve. Raises ModelError or ConfigError before any port listens."""
    if config.role == "prefill":
        with uncollected():
            from prefill_worker import worker as prefill

        return await prefill.start(config)
    with uncollected():
        from decode_worker import worker as decode

    return await decode.start(config)
