"""Starts the worker of a role: in the foreground (`baton prefill`, `baton decode`) or inside a Ray replica."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from baton.processes.without_gc import without_gc
from cluster.config.worker import WorkerConfig

if TYPE_CHECKING:
    from worker.worker import Worker


async def start_worker(config: WorkerConfig) -> Worker:
    """Load the model and serve. Raises ModelError or ConfigError before any port listens."""
    if config.role == "prefill":
        with without_gc():
            from prefill_worker import worker as prefill

        worker: Worker = await prefill.start(config)
    else:
        with without_gc():
            from decode_worker import worker as decode

        worker = await decode.start(config)
    gc.freeze()  # the modules' objects stay to the end, where collections would take most of the time of the exit
    return worker
