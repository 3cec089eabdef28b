"""A rank's NIXL endpoint, if it is to have one."""

from __future__ import annotations

import logging
import os

from cluster.config import TransferConfig
from cluster.errors import TransportError
from kv_transfer.transports.base import Endpoint

log = logging.getLogger(__name__)


def open_endpoint(config: TransferConfig, worker_id: str, epoch: int, rank: int) -> Endpoint | None:
    """None where only gRPC is wanted, or NIXL does not start and need not. Raises TransportError otherwise."""
    if config.transport == "grpc":
        return None
    if config.port_range:
        os.environ["UCX_TCP_PORT_RANGE"] = config.port_range  # UCX reads it when NIXL makes its first agent
    from kv_transfer.transports.nixl import NixlEndpoint

    try:
        return NixlEndpoint(f"{worker_id}#{epoch:x}/{rank}")
    except TransportError as error:
        if config.transport == "nixl" or config.require_transport == "nixl":
            raise
        log.warning("%s; KV goes over gRPC", error)
        return None
