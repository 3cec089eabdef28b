"""gRPC's health service, which asks for no key, with a bound on names."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from cluster import rpc
from cluster.errors import InvalidRequestError

MAX_NAME = 256  # characters of a service's name
Context = grpc.aio.ServicerContext[Any, Any]


class Health(health.aio.HealthServicer):  # type: ignore[misc, name-defined]
    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> Any:
        await _check(request, context)
        return await super().Check(request, context)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        await _check(request, context)  # a watcher's name is kept as long as it watches
        await super().Watch(request, context)


async def _check(request: health_pb2.HealthCheckRequest, context: Context) -> None:
    if len(request.service) > MAX_NAME:
        message = f"service: at most {MAX_NAME} characters"
        await rpc.abort(context, InvalidRequestError(message, field="service", limit=str(MAX_NAME)))
