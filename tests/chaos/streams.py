"""One stream: its request, its tokens and their times, and its end."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Literal

from tests.chaos.checker import Verdict
from tests.chaos.requests import Request

Kind = Literal["baton", "openai"]
Outcome = Literal["running", "done", "cancelled", "error"]


@dataclass(frozen=True)
class Silence:
    """Nothing came to a client from `begin` to `end` (monotonic seconds)."""

    begin: float
    end: float


@dataclass(eq=False)
class Stream:
    kind: Kind
    request: Request
    router: str = ""  # the one router of an OpenAI client
    request_id: str = field(default_factory=lambda: f"chaos-{secrets.token_hex(12)}")
    started: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    seed: int | None = None
    workers: tuple[str, ...] = ()
    outcome: Outcome = "running"
    problem: str = ""
    cancel_asked: bool = False
    silences: list[Silence] = field(default_factory=list)
    ended: float = 0.0
    verdict: Verdict | None = None
    attempts: int = 0
    _last: float = 0.0

    def received(self) -> None:
        """A token came, or the end."""
        now = time.monotonic()
        self.silences.append(Silence(self._last or self.started, now))
        self._last = now

    def end(self, outcome: Outcome, problem: str = "") -> None:
        self.received()
        self.outcome, self.problem, self.ended = outcome, problem, self._last

    def longest_silence(self, begin: float, until: float) -> float:
        """Seconds of the longest one that touches [begin, until], counted from `begin` on."""
        touching = [s for s in self.silences if s.end > begin and s.begin < until]
        if self.outcome == "running":
            touching.append(Silence(self._last or self.started, time.monotonic()))
        return max((s.end - max(s.begin, begin) for s in touching), default=0.0)

    def silent_since(self, moment: float) -> bool:
        """Nothing has come since then, and the stream has not ended."""
        return self.outcome == "running" and self._last < moment
