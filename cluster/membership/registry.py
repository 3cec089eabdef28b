"""The registry's scripts: as a worker calls them, and to drain a worker from any process that reaches Redis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Literal

import redis

from cluster.errors import ConfigError
from cluster.membership import keys, scripts
from cluster.membership.facts import pack
from cluster.membership.reader import read_workers
from cluster.membership.status import WorkerStatus
from cluster.membership.types import Then, WorkerInfo
from cluster.redis.connect import connect
from cluster.redis.failover import disconnect_after_failover
from cluster.redis.memory import always_writes

_DRAINS: Mapping[bytes, Then | Literal[""]] = {b"": "", b"exit": "exit", b"stay": "stay"}


def _number(answer: object) -> int:
    """Raises redis.InvalidResponse."""
    if type(answer) is not int:
        raise redis.InvalidResponse("the answer of the registry is malformed")
    return answer


def encode(info: WorkerInfo) -> str:
    facts = asdict(info)
    del facts["lease"], facts["status"], facts["state"]  # readers derive them, or have them from elsewhere
    facts["layout"] = info.layout.hex()
    facts["epoch"] = f"{info.epoch:016x}"
    return json.dumps(facts)


class Registry:
    """Every call raises redis.RedisError."""

    def __init__(self, redis_url: str, namespace: str):
        self._client = connect(redis_url)
        self._keys = keys.registry(namespace)
        self._register = self._client.register_script(always_writes(scripts.REGISTER))
        self._renew = self._client.register_script(always_writes(scripts.RENEW))
        self._leave = self._client.register_script(scripts.LEAVE)
        self._drain = self._client.register_script(always_writes(scripts.DRAIN))

    def register(self, info: WorkerInfo, status: WorkerStatus, drain: Then | None, above: int = 0) -> int:
        """Register, and return the worker's new slot, which is above `above`."""
        published = json.dumps(status.encode())
        arguments: list[str | bytes] = [info.worker_id, info.name, encode(info), published, info.process]
        arguments += [drain or "", pack(info), str(above)]
        return _number(self._register(keys=self._keys, args=arguments))

    def renew(self, info: WorkerInfo, status: WorkerStatus) -> Then | Literal[""] | None:
        """Renew the lease. Returns the reason to drain; "": none; None: the worker must register again."""
        published = json.dumps(status.encode())
        drain = self._renew(keys=self._keys, args=[info.worker_id, info.name, info.slot, published])
        if drain is not None and (type(drain) is not bytes or drain not in _DRAINS):
            raise redis.InvalidResponse("the answer to a renewal is malformed")  # no order to drain
        return None if drain is None else _DRAINS[drain]

    def leave(self, info: WorkerInfo) -> None:
        self._leave(keys=self._keys, args=[info.worker_id, info.name, info.slot])

    def drain(self, worker_id: str, then: Then) -> int:
        """0: no such worker is registered; 1: it is marked now; 2: it was marked before."""
        return _number(self._drain(keys=self._keys, args=[worker_id, then]))

    def failed(self, error: redis.RedisError) -> None:
        """Drop the connection to a server that is no longer the master."""
        disconnect_after_failover(self._client, error)

    def close(self) -> None:
        self._client.close()


def request_drain(redis_url: str, namespace: str, worker_id: str, then: Then = "exit") -> bool:
    """Mark a worker as draining: it gets no more requests, and starts to drain at its next renewal.

    Returns False if it was marked before. Raises ConfigError if no such worker is registered, and redis.RedisError.
    """
    registry = Registry(redis_url, namespace)
    try:
        answer = registry.drain(worker_id, then)
    finally:
        registry.close()
    if answer == 0:
        known = ", ".join(worker.worker_id for worker in read_workers(redis_url, namespace)) or "none"
        raise ConfigError(
            f"no worker {worker_id} in namespace {namespace}; registered are: {known}", field="worker"
        )
    return answer == 1
