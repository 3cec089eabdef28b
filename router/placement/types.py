"""A placement's request and result, and the reasons against workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from cluster.membership.types import WorkerInfo
from cluster.protocol.priority import PriorityClass

Mode = Literal["never", "fallback", "auto", "always"]


class Reason(StrEnum):
    """Why a request is not placed on a worker (router/placement/eligibility.py)."""

    # The worker's standing, and its KV group
    ROLE = "local_prefill is always: decode workers prefill"
    DRAINING = "it is draining"
    SUSPECT = "its lease is overdue"
    DEAD = "its lease has run out"
    KV_GROUP = "its model or KV layout differs from the request's"
    LINK = "it and this router have no common version of the link"
    # Exclusions of one request
    SILENT = "this router received nothing from it lately"
    REFUSED = "it had no room for this request"
    DRAINED = "it drains and has returned this request"
    LOST = "this request's stream to it was lost"
    UNANSWERED = "it did not answer whether this request's attempt had committed"
    FAULTY = "it sent what an attempt of this request cannot have"
    HANDOFF = "a hand-off of this request to it failed"
    UNREACHABLE = "a worker of the other role does not reach it, or is not reached by it"
    ADAPTER = "it has not loaded the request's adapter"
    ENGINE = "this request failed in its engine"


@dataclass(frozen=True)
class KvGroup:
    """Workers between which KV can move (router/placement/kv_groups.py)."""

    model_id: str
    page_size: int
    layout: bytes = b""  # serialised KvLayout, without what a pair need not agree on


@dataclass(frozen=True)
class PlacementRequest:
    transfer_id: bytes
    chain: bytes  # packed 8-byte index keys of the prompt's full blocks
    token_count: int
    output_tokens: int  # expected
    excluded: Mapping[str, Reason] = field(default_factory=dict)  # by worker_id, or by worker_id@epoch
    kv_group: KvGroup | None = None  # among these workers only; the chain is hashed for it
    explain: bool = False
    priority_class: PriorityClass = "normal"
    target_seconds: float = 0.0  # the first token is wanted within this; 0 = no limit
    deadline_seconds: float = 0.0  # the request is refused if its first token would come later
    tenant: str = ""
    weight: float = 1.0  # of the tenant
    model: str = ""  # the name of one of the router's models; "": the first
    whole_prompt: bool = False  # the worker that prefills computes each position, whatever it has cached
    ends_at_prefill: bool = False  # without a hand-off, unless a decode worker prefills

    def decode_tokens(self, *, local: bool) -> int:
        """Tokens that will be resident at the decode worker. `local`: it prefills."""
        return 0 if self.ends_at_prefill and not local else self.token_count + self.output_tokens


@dataclass(frozen=True)
class Placed:
    prefill: WorkerInfo | None  # None: the decode worker prefills
    decode: WorkerInfo
    cached_prefill_tokens: int
    cached_decode_tokens: int
    from_redis: bool
    terms: dict[str, float] = field(default_factory=dict)  # seconds
    uncached_tokens: int = 0  # of the prompt, that the worker which prefills computes
    why_not: dict[str, Reason] | None = None  # by worker_id; only for a request that asks for it

    @property
    def explanation(self) -> dict[str, object]:
        """The decision in the form of `explain`."""
        return {"terms": self.terms, "from_redis": self.from_redis, "why_not": self.why_not or {}}
