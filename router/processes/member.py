"""A process among those of its router: what it shares with the others."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from cluster.config.router import RouterConfig
from cluster.protocol.times import SUSPECT_SECONDS
from router.admission.tally import Tallies
from router.processes.memory import Figure, SharedMemory, Slot, others
from router.processes.parent_link import ParentLink
from router.processes.readiness import why_not_ready
from router.processes.tallies import shared_tallies

# With more connections than these beyond another process's, a process lets that one accept first.
SLACK_CONNECTIONS = 2

# In which a process closes once the drain limit has passed: it ends streams, its loops, and its clients of Redis.
CLOSE_SECONDS = 30.0


class Member:
    def __init__(
        self,
        name: str,
        index: int,
        memory: SharedMemory,
        http_listeners: list[socket.socket],
        parent: ParentLink,
    ):
        """`name`: the router's; its processes are called name/0, name/1, …"""
        self.name = name
        self.index = index
        self.http_listeners = http_listeners
        self.parent = parent
        self._memory = memory
        self._slot = memory.slot(index)
        self._others = list(others(memory, index))

    @property
    def processes(self) -> int:
        return self._memory.processes

    def tallies(self) -> Tallies:
        return shared_tallies(self._memory, self.index)

    def beat(self, why_not: Sequence[str], *, draining: bool) -> None:
        """Report to the others; every half a second, and at once when this process leaves."""
        self._slot.set(Figure.DRAINING, int(draining))
        self._slot.write_status(list(why_not))
        self._slot.beat()

    def why_not_ready(self, own: Sequence[str]) -> list[str]:
        """Why the router is not ready, over all its processes."""
        return why_not_ready(self._memory, {self.index: own})

    def in_flight(self) -> int:
        """Requests of all processes."""
        return sum(slot.get(Figure.IN_FLIGHT) for slot in self._memory.slots())

    def count_request(self) -> None:
        self._slot.add(Figure.REQUESTS, 1)

    def requests(self) -> int:
        """Since the router's start, also of processes that have ended."""
        return sum(slot.get(Figure.REQUESTS) for slot in self._memory.slots())

    # --- HTTP connections ----------------------------------------------------------------------------------------

    def has_connections(self, count: int) -> None:
        self._slot.set(Figure.HTTP_CONNECTIONS, count)

    def connections_elsewhere(self) -> int:
        return sum(slot.get(Figure.HTTP_CONNECTIONS) for slot in self._others)

    def is_opening(self, count: int) -> None:
        self._slot.set(Figure.OPENING, count)

    def has_more_connections(self) -> bool:
        """Whether another process that accepts has fewer, those that are being opened included."""
        own = _accepted(self._slot)
        return any(
            _accepted(slot) + SLACK_CONNECTIONS < own
            for slot in self._others
            if not slot.get(Figure.DRAINING) and (slot.silent_seconds() or SUSPECT_SECONDS) < SUSPECT_SECONDS
        )


def _accepted(slot: Slot) -> int:
    """HTTP connections."""
    return slot.get(Figure.HTTP_CONNECTIONS) + slot.get(Figure.OPENING)


def process_config(config: RouterConfig, index: int, http_port: int, grpc_port: int) -> RouterConfig:
    """The settings of one process: limits that it cannot count together with the others are its share."""

    def share(total: int) -> int:
        return -(-total // config.processes)

    return config.model_copy(
        update={
            "router_id": f"{config.router_id}/{index}",
            "http_port": http_port,
            "grpc_port": grpc_port,
            "metrics_port": None,
            "max_grpc_connections": share(config.max_grpc_connections),
            "max_health_watchers": share(config.max_health_watchers),
            "tokenized_cache_bytes": share(config.tokenized_cache_bytes),
        }
    )


def drain_limit_seconds(config: RouterConfig) -> float:
    """Seconds from SIGTERM until a process has drained; a moment later it is taken for one that does not answer."""
    return config.drain_delay_seconds + config.drain_seconds + SUSPECT_SECONDS


def kill_limit_seconds(config: RouterConfig) -> float:
    """Seconds from SIGTERM until a process that has not ended is killed: longer than any that works takes."""
    return drain_limit_seconds(config) + CLOSE_SECONDS
