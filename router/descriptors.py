"""How many connections a router may hold with the file descriptors of its process."""

from __future__ import annotations

import logging
import resource

from cluster.config import RouterConfig

log = logging.getLogger(__name__)
OTHERS = 512  # descriptors for workers, Redis, files and probes, which no client may take


def most_connections(config: RouterConfig) -> tuple[int, int]:
    """Of HTTP and of gRPC. Raises the process's soft limit to the hard one; if that is too low for the configured numbers,
    both are reduced in proportion, with a warning."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    http, grpc = config.max_http_connections, config.max_grpc_connections
    if hard == resource.RLIM_INFINITY or http + grpc + OTHERS <= hard:
        return http, grpc
    share = max(0, hard - OTHERS) / (http + grpc)
    fewer = max(1, int(http * share)), max(1, int(grpc * share))
    log.warning(
        "max_http_connections and max_grpc_connections are %d and %d here instead of %d and %d: this process may have "
        "%d file descriptors (ulimit -Hn)",
        *fewer,
        http,
        grpc,
        hard,
    )
    return fewer
