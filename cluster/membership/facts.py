"""Facts about a worker for placement, packed as Redis keeps them in `facts`, and which workers form a KV group."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

from cluster.membership.types import WorkerInfo
from wire import common_pb2

FORMAT = 1  # first byte; scripts pass over workers of another format
CLIQUE, HOST = 1, 2  # what workers of one place share; counted as in topology.LEVELS, from 1
_LAYOUT = ">BBId12s12s12sB12s"  # FACTS in sets.lua
_NOWHERE = b"0" * 12


def place_of(worker: WorkerInfo) -> str:
    """Workers of one place share a clique or a host."""
    return worker.place or worker.host


def capacity_of(worker: WorkerInfo) -> float:
    """The tokens for which a worker's KV cache has room."""
    return float(worker.blocks_total * worker.page_size)


def pack(worker: WorkerInfo) -> bytes:
    """format, what its place shares, slot, capacity in tokens, place, rack, zone, role (0 prefill), KV group."""
    where = worker.location
    return struct.pack(
        _LAYOUT,
        *(FORMAT, CLIQUE if where.clique else HOST, worker.slot),
        capacity_of(worker),
        *(_digest(place_of(worker)), _digest(where.rack), _digest(where.zone)),
        0 if worker.role == "prefill" else 1,
        group_id(worker.model_id, worker.page_size, worker.layout),
    )


def group_id(model_id: str, page_size: int, layout: bytes) -> bytes:
    """The name of a KV group in Redis."""
    return _digest(f"{model_id}\0{page_size}\0{comparable(layout).hex()}")


@lru_cache(maxsize=256)
def comparable(layout: bytes) -> bytes:
    """Heads are re-sharded on the way: the degree of tensor parallelism may differ."""
    parsed = common_pb2.KvLayout.FromString(layout)
    parsed.tensor_parallel = 0
    return parsed.SerializeToString(deterministic=True)


@lru_cache(maxsize=65_536)
def _digest(name: str) -> bytes:
    """Twelve characters, whatever the name; zeros where it is empty."""
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest().encode() if name else _NOWHERE
