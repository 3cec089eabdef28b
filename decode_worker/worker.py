"""Starts a decode worker."""

from __future__ import annotations

from cluster.config.worker import WorkerConfig
from decode_worker.role import DecodeRole
from decode_worker.service import DecodeService
from wire import decode_pb2_grpc
from worker.role import RoleParts
from worker.worker import Worker, start_worker


def make_role(parts: RoleParts) -> DecodeRole:
    """Raises SetupError."""
    role = DecodeRole(parts)
    service = DecodeService(parts, role)
    parts.server.add(lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(service, server))
    return role


async def start(config: WorkerConfig) -> Worker:
    """Load the model, then serve. Raises ModelError, ConfigError or SetupError."""
    return await start_worker(config, make_role)
