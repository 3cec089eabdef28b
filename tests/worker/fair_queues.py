"""Requests in a fair queue."""

from __future__ import annotations

import asyncio

from cluster.fair_queue import FairQueue, Waiting


def waiting(order: int, tenant: str, tokens: int, weight: float = 1.0) -> Waiting:
    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    return Waiting(tokens, tenant, weight, 0.0, order, turn)


def queued(
    queue: FairQueue, loop: asyncio.AbstractEventLoop, tenant: str, tokens: int, order: int
) -> Waiting:
    waiting = Waiting(tokens, tenant, 1.0, 0.0, order, loop.create_future())
    queue.push(waiting)
    return waiting
