"""A rank's NIXL endpoint, if it is to have one."""

from __future__ import annotations

import logging
import os

from cluster.config import TransferConfig
from cluster.errors import ConfigError, TransportError
from kv_transfer.transports.base import Endpoint

log = logging.getLogger(__name__)
# Without tcp UCX has nothing to fall back to where RDMA is missing: NIXL does not start there, or does not connect.
RDMA_TLS = "rc,dc,ud,sm,self,cuda"
_NOT_TCP = (
    "rc",
    "dc",
    "ud",
    "ib",
    "sm",
    "shm",
    "posix",
    "sysv",
    "cma",
    "knem",
    "xpmem",
    "self",
    "cuda",
    "gdr",
)


def open_endpoint(config: TransferConfig, worker_id: str, epoch: int, rank: int) -> Endpoint | None:
    """None where only gRPC is wanted, or NIXL does not start and need not. Raises TransportError otherwise, and
    ConfigError where RDMA is required and UCX_TLS allows more."""
    if config.transport == "grpc":
        return None
    if config.port_range:
        os.environ["UCX_TCP_PORT_RANGE"] = config.port_range  # UCX reads it when NIXL makes its first agent
    if config.require_transport == "rdma":
        _allow_rdma_only()
    from kv_transfer.transports.nixl import NixlEndpoint

    try:
        return NixlEndpoint(f"{worker_id}#{epoch:x}/{rank}")
    except TransportError as error:
        if config.transport == "nixl" or config.required == "nixl":
            raise
        log.warning("%s; KV goes over gRPC", error)
        return None


def _allow_rdma_only() -> None:
    """NIXL does not say which of its transports UCX has chosen, so it gets no choice."""
    given = os.environ.setdefault("UCX_TLS", RDMA_TLS)
    others = [name for name in given.split(",") if not name.strip().startswith(_NOT_TCP)]
    if others:
        raise ConfigError(
            f"UCX_TLS={given} allows {', '.join(others)}, require_transport: rdma does not; default: {RDMA_TLS}",
            field="transfer.require_transport",
        )
