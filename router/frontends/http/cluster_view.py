"""What `/v1/cluster` shows: workers, load, placement. No secrets, no prompts."""

from __future__ import annotations

import time
from typing import Any

from cluster.membership.types import WorkerInfo
from router.gateway import RequestGateway


async def cluster_view(gateway: RequestGateway) -> dict[str, Any]:
    services = gateway.services
    return {
        "router": {
            "id": gateway.config.router_id,
            "uptime_seconds": time.monotonic() - gateway.started,
            "requests_in_flight": gateway.admission.in_flight,
            "requests": gateway.requests,
        },
        "redis": {"ok": services.members.redis_ok},
        "placement": {
            "calls": await services.placement.calls_in_redis(),
            "calls_here": services.placement.calls,
            "mode": services.placement.mode,
            "requests": gateway.requests,
        },
        "workers": [_worker(worker) for worker in services.members.all],
    }


def _worker(worker: WorkerInfo) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "role": worker.role,
        "address": worker.address,
        "epoch": f"{worker.epoch:016x}",
        "slot": worker.slot,
        "state": worker.state,
        "lease": worker.lease,
        "metrics": worker.metrics_address,
        "status": worker.status.encode(),
    }
