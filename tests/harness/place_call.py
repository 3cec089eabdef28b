"""Arguments of place.lua, for calls that no router makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.index import scripts
from router.placement.candidates import Candidates, Heads
from router.placement.place_script import Decision, Numbers


@dataclass
class PlaceCall:
    """The cost model's and the request's arguments; the defaults are those of a small prompt in an idle cluster."""

    namespace: str
    model_id: str = "m"
    router: str = "router"
    chain: bytes = b""
    tokens: int = 100
    page: int = 16
    output: int = 10
    mode: str = "never"
    random: float = 0.0
    a: float = 1e-3
    b: float = 0.0
    token_bytes: float = 1.0
    bandwidths: tuple[float, ...] = (1e12,) * 5
    per_token: float = 1e-9
    feeds: str = "hybrid"
    ttl_ms: int = 3_600_000
    predict_ms: int = 10_000
    rate: float = 1000.0
    priority_class: str = "normal"
    target: float = 0.0
    deadline: float = 0.0
    lease_ms: int = 60_000
    transfer_id: bytes = b"t"
    replaces: bytes = b""
    whole: bool = False
    alone: bool = False

    def arguments(self, run: int, number: int, candidates: Candidates | Heads) -> list[Any]:
        numbers = Numbers(
            tokens=self.tokens,
            page_size=self.page,
            output_tokens=self.output,
            random=self.random,
            a=self.a,
            b=self.b,
            token_bytes=self.token_bytes,
            per_token=self.per_token,
            rate=self.rate,
            ttl_ms=self.ttl_ms,
            target_seconds=self.target,
            deadline_seconds=self.deadline,
            run=run,
            number=number,
            predict_ms=self.predict_ms,
            lease_ms=self.lease_ms,
            whole=self.whole,
            alone=self.alone,
        )
        return [
            *(scripts.prefix(self.namespace, self.model_id), self.router, self.chain),
            *(numbers.packed(self.bandwidths), self.mode, self.feeds, self.priority_class),
            *(self.transfer_id, self.replaces, *candidates.arguments),
        ]


def decision(answer: Any) -> Decision | int:
    """The script's answer; a number where it has placed nothing."""
    return Decision.unpack(answer) if isinstance(answer, bytes) else int(answer[0])
