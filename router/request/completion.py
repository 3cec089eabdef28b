"""A request, whichever door it came through, and what comes back of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from cluster.security.keys import NO_LIMITS, RateLimits
from router.text.stop import StopStrings
from wire import common_pb2, inference_pb2

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Completion:
    """Validated: nothing here can be refused by a worker for its form."""

    request_id: str
    model: str
    prompt_tokens: list[int]
    sampling: common_pb2.SamplingParams
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_text: bool = False
    priority: int = 0
    resume_tokens: list[int] = field(default_factory=list)
    resume_ticket: bytes = (
        b""  # proves that the request was taken in already (router/request/resume_tickets.py)
    )
    reconnects: int = 0  # routers that were lost with it before
    explain: bool = False
    deadline_seconds: float = 600.0
    tenant: str = ""  # whose key it came with
    weight: float = 1.0  # of the tenant, beside other tenants'
    rate_limits: RateLimits = NO_LIMITS
    # From the client: within its tenant, only requests with the same salt share prefixes
    cache_salt: str = ""
    prefix_scope: str = ""  # who shares its prefixes; goes into the salt of its block hashes

    @cached_property
    def stop_strings(self) -> StopStrings:
        return StopStrings(self.stop)


@dataclass(frozen=True)
class Delta:
    """What came at once for one choice."""

    choice: int
    text: str
    tokens: tuple[common_pb2.Token, ...]
    finish: FinishReason | None = None


@dataclass(frozen=True)
class Outcome:
    """The truth about a finished request."""

    usage: inference_pb2.Usage
    timings: inference_pb2.Timings
    explanation: str = ""
