"""One request as its client saw it. All times are seconds since the run began."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from loadgen.config import Protocol, Slo
from wire.inference_pb2 import Timings

# Stages of a request in the server: fields of Timings, and their names in reports
STAGES = {
    "router_queue_seconds": "router queue",
    "placement_seconds": "placement",
    "prefill_queue_seconds": "prefill queue",
    "prefill_seconds": "prefill",
    "handoff_exposed_seconds": "hand-off, exposed",
    "decode_queue_seconds": "decode queue",
    "decode_seconds": "decode",
}
QUEUES = frozenset(stage for stage in STAGES if stage.endswith("_queue_seconds"))


@dataclass(frozen=True)
class Failure:
    """Why a request failed: `kind` groups them ("deadline", "http_429", "OverloadedError" …)."""

    kind: str
    message: str = ""
    target: str = ""


@dataclass
class RequestRecord:
    """Filled in while the request runs. An arrival is (time, number of tokens, 1 if the server does not report it)."""

    protocol: Protocol
    session: int
    turn: int
    intended: float  # when it was due; latencies count from here
    slo: Slo = field(default_factory=Slo)
    sent: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    usage_tokens: int | None = None  # output tokens by the server's own count
    cached_tokens: int = 0
    timings: Timings | None = None  # Baton's; other servers report none
    stages: dict[str, float] = field(default_factory=dict)  # those of STAGES that it reported, in seconds
    failure: Failure | None = None
    sample_prompt: str = ""
    sample_answer: str = ""

    def arrived(self, now: float, tokens: int) -> None:
        self.arrivals.append((now, tokens))

    @property
    def ok(self) -> bool:
        return self.failure is None and bool(self.arrivals)

    @property
    def output_tokens(self) -> int:
        if self.usage_tokens is not None:
            return self.usage_tokens
        return sum(tokens for _, tokens in self.arrivals)

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.intended

    @property
    def e2e(self) -> float:
        """To the last token."""
        return self.arrivals[-1][0] - self.intended

    @property
    def tpot(self) -> float | None:
        """(E2E − TTFT) / (n − 1); None for a single token."""
        n = self.output_tokens
        return (self.e2e - self.ttft) / (n - 1) if n > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between arrivals. Tokens that arrived together share one gap."""
        times = [at for at, _ in self.arrivals]
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def good(self) -> bool:
        """Answered, and within its SLO."""
        if not self.ok:
            return False
        slo, tpot = self.slo, self.tpot
        return (
            (slo.ttft_seconds is None or self.ttft <= slo.ttft_seconds)
            and (slo.tpot_seconds is None or tpot is None or tpot <= slo.tpot_seconds)
            and (slo.e2e_seconds is None or self.e2e <= slo.e2e_seconds)
        )
