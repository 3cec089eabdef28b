"""How `baton up` divides a machine's memory, and that of its cards, between the ranks that it starts.

If each rank measured free memory by itself, each would take all of it: they load at the same time, and host memory is in
use only once it is written to. So the memory is measured once, before the first rank starts, and each rank gets an equal
share of it, the same one whenever it is restarted.
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

from cluster.config.worker import EngineConfig, Role
from cluster.errors import ConfigError
from cluster.process.memory import Limit, room_bytes

log = logging.getLogger(__name__)
# Measured: a router with a tokenizer; Ray's processes with Serve and two empty replicas.
ROUTER_BYTES = 256 << 20
RAY_BYTES = 1 << 30
# Private memory of a rank without weights and KV: 245 MiB on a host (libraries, mostly torch); a CUDA context takes more.
RANK_BYTES = 240 << 20
PROCESS_SECONDS = 60.0  # limit of a process that loads torch and prints what it found
_DRIVER = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
HOST = -1  # a location; the others are numbers of cards


class PoolMemory(NamedTuple):
    """The workers of a role."""

    workers: int  # as many as may run at once
    ranks: int  # of one worker
    device: str  # EngineConfig.device
    utilization: float  # EngineConfig.memory_utilization
    kv_bytes: int  # EngineConfig.kv_memory_bytes
    draft_bytes: int = 0  # of the draft model's KV pool, at a worker's first rank

    def locations(self, cards: int) -> Iterator[int]:
        """Yield the location of each rank on a machine with `cards` cards, as engine/build.py places it."""
        on_host = self.device == "cpu" or not cards
        named = self.device.partition(":")[2]
        for rank in range(self.ranks):
            location = HOST if on_host else int(named or rank % cards)
            yield from [location] * self.workers


class Machine(NamedTuple):
    host: Sequence[Limit]
    cards: Sequence[Limit]
    set_aside: int  # bytes of the host for the cluster's other processes

    def limits(self, location: int) -> Sequence[Limit]:
        """Empty for a card that the machine does not have."""
        return self.host if location == HOST else self.cards[location : location + 1]


def divide(pools: Mapping[Role, PoolMemory], machine: Machine) -> dict[Role, int]:
    """The bytes that one rank of each role may take. Raises ConfigError if it is too little for any model."""
    ranks = Counter(location for pool in pools.values() for location in pool.locations(len(machine.cards)))
    return {role: _share(pool, machine, ranks) for role, pool in pools.items() if pool.workers}


def _share(pool: PoolMemory, machine: Machine, ranks: Counter[int]) -> int:
    """The smallest share of all locations of the pool, because its workers are alike."""
    shares = []
    for location in set(pool.locations(len(machine.cards))):
        limits = machine.limits(location)
        if not limits:  # the worker refuses to start, and names the card
            continue
        room = room_bytes(limits, pool.utilization) - (machine.set_aside if location == HOST else 0)
        # With a given size of the KV pool, check_given compares with what is free
        least = 1 if pool.kv_bytes else RANK_BYTES
        if room < ranks[location] * least:
            smallest = min(limits, key=lambda limit: room_bytes([limit], pool.utilization))
            raise ConfigError(
                f"--memory-utilization {pool.utilization:g} of {_in_gib(smallest.total)}, {_in_gib(smallest.used)} of "
                f"them in use, leaves {_in_gib(max(room, 0))} for {ranks[location]} ranks of workers, each of which takes "
                f"{_in_gib(RANK_BYTES)} without weights: start fewer (--prefill, --decode, --routers), or free memory",
                field="memory_utilization",
            )
        shares.append(room // ranks[location])
    return min(shares, default=0)


def check_given(pools: Mapping[Role, PoolMemory], machine: Machine) -> None:
    """Raise ConfigError if KV pools of given sizes do not fit the free memory together.

    The kernel commits host memory on first use, so an oversized pool is allocated without an error and its worker is
    killed later, under load.
    """
    asked, ranks, drafts = Counter[int](), Counter[int](), Counter[int]()
    for pool in pools.values():
        for location in pool.locations(len(machine.cards)):
            asked[location] += pool.kv_bytes
            ranks[location] += 1
        first = next(pool._replace(ranks=1, workers=1).locations(len(machine.cards)))
        drafts[first] += pool.workers * pool.draft_bytes
    for location, total in asked.items():
        free = min((limit.free for limit in machine.limits(location)), default=total + drafts[location])
        where = "" if location == HOST else f" on card {location}"
        if drafts[location] > free:
            raise ConfigError(
                f"--draft-kv-memory: {_in_gib(drafts[location])} in all is more than the {_in_gib(free)} of memory that "
                f"are free{where}: give less",
                field="draft_kv_memory",
            )
        free -= drafts[location]
        if total > free:
            beside = f" beside {_in_gib(drafts[location])} for draft models" if drafts[location] else ""
            raise ConfigError(
                f"--kv-memory {_in_gib(total // ranks[location])} for each of {ranks[location]} ranks is more than the "
                f"{_in_gib(free)} of memory that are free{where}{beside}: give less than "
                f"{_in_gib(free // ranks[location])}, or omit it for a share that fits",
                field="kv_memory",
            )


def has_driver() -> bool:
    """Whether this machine can have CUDA cards."""
    return any(file.exists() for file in _DRIVER)


def cards() -> list[Limit]:
    """The machine's CUDA cards as torch sees them. Without a driver there are none, and torch is not started."""
    if not has_driver():
        return []
    command = [sys.executable, "-m", "engine.cards"]
    try:
        output = subprocess.run(command, capture_output=True, timeout=PROCESS_SECONDS, check=True).stdout
        return [Limit(*card) for card in json.loads(output)]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        log.warning(
            "the memory of the cards could not be read, so it is not divided between ranks: %s", error
        )
        return []


def draft_pool_bytes(engine: EngineConfig) -> int:
    """Return the bytes of the KV pool of `engine`'s draft model; 0 if they are unknown, because then the worker refuses
    the draft model with the reason."""
    if engine.draft_model is None or engine.draft_kv_memory_bytes:
        return engine.draft_kv_memory_bytes
    command = [sys.executable, "-m", "engine.speculation.pool_bytes"]
    given = engine.model_dump_json().encode()
    try:
        found = subprocess.run(command, input=given, capture_output=True, timeout=PROCESS_SECONDS, check=True)
        return int(found.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning(
            "the size of the draft model's KV pool is unknown, so memory is not checked for it: %s", error
        )
        return 0


def _in_gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
