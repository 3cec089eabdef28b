"""Shares of the process's file descriptors: neither port may use those that the other, Redis and the workers need."""

from __future__ import annotations

import logging

from cluster.config.router import RouterConfig
from cluster.process.descriptors import free_for_connections, raised
from router.listening import grpc_servers

log = logging.getLogger(__name__)


def within_descriptors(config: RouterConfig) -> RouterConfig:
    """The connection limits, lowered in proportion where this process may not open so many files."""
    return fitted(config, raised())


def fitted(config: RouterConfig, descriptors: int) -> RouterConfig:
    free = free_for_connections(descriptors)
    http, grpc = config.max_http_connections, config.max_grpc_connections
    wanted = http + max_unopened(http) + grpc * grpc_servers(config)
    if wanted <= free:
        return config
    share = free / wanted
    fewer = {"max_http_connections": int(http * share), "max_grpc_connections": int(grpc * share)}
    log.warning(
        "%d file descriptors (ulimit -n) are too few for the connection limits: %s", descriptors, fewer
    )
    return config.model_copy(update={name: max(1, number) for name, number in fewer.items()})


def max_silent(max_http_connections: int) -> int:
    """Limit of connections to the HTTP port that have sent nothing yet, beside those that the limit counts."""
    return max(1, max_http_connections // 2)


def max_unopened(max_http_connections: int) -> int:
    """The most connections to the HTTP port that this limit does not count: silent ones, and as many each of those whose
    first bytes have arrived, with a key and without (ready.py)."""
    return 3 * max_silent(max_http_connections)
