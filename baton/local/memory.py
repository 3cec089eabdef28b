"""How `baton up` divides a machine's memory, and that of its cards, between the ranks that it starts.

Ranks that measured for themselves what is free would each take all of it: they load at the same time, and host memory is
in use only once it is written to. So every rank gets its part of what was free before the first one started, also when it
is started again.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cluster.config.worker import Role
from cluster.errors import ConfigError
from cluster.process.memory import Limit, room_bytes

log = logging.getLogger(__name__)
# Measured: a router with a tokenizer; Ray's processes with Serve and two empty replicas.
ROUTER_BYTES = 256 << 20
RAY_BYTES = 1 << 30
CARDS_SECONDS = 60.0
_DRIVER = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
HOST = -1  # beside the numbers of cards


class PoolMemory(NamedTuple):
    """The workers of a role, as many as may run at once."""

    workers: int
    ranks: int  # of one worker
    device: str
    utilization: float
    kv_bytes: int  # given for one rank; 0 = none

    def places(self, cards: int) -> Iterator[int]:
        """Where its ranks are, by the rule of engine/build.py; without a card all are on the host."""
        on_host = self.device == "cpu" or not cards
        named = self.device.partition(":")[2]
        for rank in range(self.ranks):
            place = HOST if on_host else int(named or rank % cards)
            yield from [place] * self.workers


class Machine(NamedTuple):
    host: Sequence[Limit]
    cards: Sequence[Limit]
    beside: int  # bytes of the host that other processes of the cluster will take

    def limits(self, place: int) -> Sequence[Limit]:
        return self.host if place == HOST else self.cards[place : place + 1]


def divide(pools: Mapping[Role, PoolMemory], machine: Machine) -> dict[Role, int]:
    """The bytes that one rank of each role may take. Raises ConfigError if nothing is left."""
    ranks = Counter(place for pool in pools.values() for place in pool.places(len(machine.cards)))
    return {role: _part(pool, machine, ranks) for role, pool in pools.items() if pool.workers}


def _part(pool: PoolMemory, machine: Machine, ranks: Counter[int]) -> int:
    parts = []
    for place in set(pool.places(len(machine.cards))):
        limits = machine.limits(place)
        if not limits:  # a card that is not there: the worker says so
            continue
        room = room_bytes(limits, pool.utilization) - (machine.beside if place == HOST else 0)
        if room < ranks[place]:
            smallest = min(limits, key=lambda limit: room_bytes([limit], pool.utilization))
            raise ConfigError(
                f"--memory-utilization {pool.utilization:g} of {smallest.total} bytes, {smallest.used} of them in use, "
                f"leaves nothing for {ranks[place]} ranks: {ranks[place] - room} bytes are missing",
                field="memory_utilization",
            )
        parts.append(room // ranks[place])
    return min(parts, default=0)


def check_given(pools: Mapping[Role, PoolMemory], machine: Machine) -> None:
    """Raise ConfigError if KV pools of given sizes do not fit the free memory together.

    The kernel commits host memory on first use, so an oversized pool is allocated without an error and its worker is
    killed later, under load.
    """
    asked, ranks = Counter[int](), Counter[int]()
    for pool in pools.values():
        for place in pool.places(len(machine.cards)):
            asked[place] += pool.kv_bytes
            ranks[place] += 1
    for place, total in asked.items():
        free = min((limit.free for limit in machine.limits(place)), default=total)
        if total > free:
            raise ConfigError(
                f"--kv-memory {_in_gib(total // ranks[place])} for each of {ranks[place]} ranks is more than the "
                f"{_in_gib(free)} of memory that are free{'' if place == HOST else f' on card {place}'}: give less than "
                f"{_in_gib(free // ranks[place])}, or omit it for a share that fits",
                field="kv_memory",
            )


def cards() -> list[Limit]:
    """The machine's CUDA cards as torch sees them; without a driver torch is not asked."""
    if not any(file.exists() for file in _DRIVER):
        return []
    command = [sys.executable, "-m", "engine.cards"]
    try:
        said = subprocess.run(command, capture_output=True, timeout=CARDS_SECONDS, check=True).stdout
        return [Limit(*card) for card in json.loads(said)]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        log.warning("the cards' memory is not known, and not divided: %s", error)
        return []


def _in_gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
