"""Fleets of any size, without a registry, and requests to place on them."""

from __future__ import annotations

import secrets
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from cluster.membership.types import WorkerInfo
from router.placement.types import PlacementRequest, Reason

INFO = WorkerInfo("", 1, 0, "prefill", "m", "h:1", "", b"", "", "h", 4096, 10_000)


def fleet(pairs: int) -> Any:
    """A router's membership view without a registry."""
    names = [(role, n) for role in ("prefill", "decode") for n in range(pairs)]
    workers = [
        replace(INFO, worker_id=f"{role}-{n}", slot=slot, role=role, host=f"h{n}")  # type: ignore[arg-type]
        for slot, (role, n) in enumerate(names, 1)
    ]

    async def refresh() -> None:
        """The view stays."""

    return SimpleNamespace(all=workers, refresh=refresh)


def request(*excluded: str) -> PlacementRequest:
    return PlacementRequest(secrets.token_bytes(16), b"", 100, 10, dict.fromkeys(excluded, Reason.SILENT))
