"""Draining a worker, from any process that reaches Redis."""

from __future__ import annotations

from cluster.errors import ConfigError
from cluster.membership import keys, scripts
from cluster.membership.reader import read_workers
from cluster.membership.types import Then
from cluster.redis.connect import connect


def request_drain(redis_url: str, namespace: str, worker_id: str, then: Then = "exit") -> bool:
    """The worker gets no more requests from now on, and starts to drain at its next renewal.

    False: it was requested before. Raises ConfigError if no such worker is registered, and redis.RedisError.
    """
    client, registry = connect(redis_url), keys.registry(namespace)
    try:
        answer = client.eval(scripts.DRAIN, len(registry), *registry, worker_id, then)
    finally:
        client.close()
    if answer == 0:
        known = ", ".join(worker.worker_id for worker in read_workers(redis_url, namespace)) or "none"
        raise ConfigError(
            f"no worker {worker_id} in namespace {namespace}; registered are: {known}", field="worker"
        )
    return bool(answer == 1)
