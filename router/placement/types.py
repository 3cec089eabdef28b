"""What placement is asked and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cluster.membership.types import WorkerInfo

Mode = Literal["never", "fallback", "auto", "always"]
PriorityClass = Literal["high", "normal", "batch"]


def priority_class_of(priority: int) -> PriorityClass:
    """The class of a request: what is above 0 is high, what is below is batch."""
    return "high" if priority > 0 else "batch" if priority < 0 else "normal"


@dataclass(frozen=True)
class Generation:
    """Workers between which KV can move (router/placement/generations.py)."""

    model_id: str
    page_size: int
    layout: bytes = b""  # serialised KvLayout, without what a pair need not agree on


@dataclass(frozen=True)
class PlacementRequest:
    transfer_id: bytes
    chain: bytes  # packed 8-byte index keys of the prompt's full blocks
    token_count: int
    output_tokens: int  # expected
    excluded: frozenset[str] = frozenset()  # ids of workers that failed this request, names of suspects
    generation: Generation | None = None  # among these workers only; the chain is hashed for it
    explain: bool = False
    priority_class: PriorityClass = "normal"
    target_seconds: float = 0.0  # the first token is wanted within this; 0 = whenever
    deadline_seconds: float = 0.0  # and is worth nothing after this

    def excludes(self, worker: WorkerInfo) -> bool:
        return worker.worker_id in self.excluded or worker.name in self.excluded


@dataclass(frozen=True)
class Placed:
    prefill: WorkerInfo | None  # None: the decode worker prefills
    decode: WorkerInfo
    cached_prefill_tokens: int
    cached_decode_tokens: int
    from_redis: bool
    terms: dict[str, float] = field(default_factory=dict)  # seconds


@dataclass
class Charge:
    """What one attempt added to the load that all routers share."""

    prefill: str  # worker@epoch
    decode: str
    prefill_tokens: int
    decode_tokens: int
    priority_class: PriorityClass = "normal"
