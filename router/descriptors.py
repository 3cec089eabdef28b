"""File descriptors for the HTTP and gRPC ports: neither may take those that the other, Redis and the workers need."""

from __future__ import annotations

import logging
import resource

from cluster.config import RouterConfig

# For Redis, channels to workers, metrics, files and listeners; half of what there is where that is less.
RESERVED = 512
log = logging.getLogger(__name__)


def within_descriptors(config: RouterConfig) -> RouterConfig:
    """The connection limits, lowered in proportion where this process may not open so many files."""
    return fitted(config, _raised())


def fitted(config: RouterConfig, descriptors: int) -> RouterConfig:
    free = descriptors - min(RESERVED, descriptors // 2)
    http, grpc = config.max_http_connections, config.max_grpc_connections
    if http + grpc <= free:
        return config
    share = free / (http + grpc)
    fewer = {"max_http_connections": int(http * share), "max_grpc_connections": int(grpc * share)}
    log.warning(
        "%d file descriptors (ulimit -n) are too few for the connection limits: %s", descriptors, fewer
    )
    return config.model_copy(update={name: max(1, number) for name, number in fewer.items()})


def _raised() -> int:
    """How many files this process may open, after asking for as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 30
