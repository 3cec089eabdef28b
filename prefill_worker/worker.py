"""Starts a prefill worker."""

from __future__ import annotations

from cluster.config.worker import WorkerConfig
from kv_transfer.prefill_side.sender import HandoffSender
from prefill_worker.role import PrefillRole
from prefill_worker.service import PrefillService
from wire import prefill_pb2_grpc
from worker.role import RoleParts
from worker.worker import Worker, start_worker


def make_role(parts: RoleParts) -> PrefillRole:
    sender = HandoffSender(
        worker=parts.identity.ref,
        layout=parts.identity.layout,
        ranks=parts.ranks.endpoints,
        config=parts.config.transfer,
        peers=parts.peers,
        on_failed=parts.fail,
        faults=parts.faults,
    )
    role = PrefillRole(parts, sender)
    service = PrefillService(role, parts.identity.worker_id)
    parts.server.add(lambda server: prefill_pb2_grpc.add_PrefillServicer_to_server(service, server))
    return role


async def start(config: WorkerConfig) -> Worker:
    """Load the model, then serve. Raises ModelError, ConfigError or SetupError."""
    return await start_worker(config, make_role)
