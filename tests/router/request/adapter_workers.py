"""Workers that have loaded adapters."""

from __future__ import annotations

from dataclasses import replace

from cluster.membership.types import WorkerInfo

WORKER = WorkerInfo("w", 7, 3, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)


def workers(*adapters: tuple[tuple[str, str], ...]) -> list[WorkerInfo]:
    return [replace(WORKER, worker_id=f"w{i}", adapters=one) for i, one in enumerate(adapters)]
