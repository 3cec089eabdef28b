"""A fake tensor-parallel rank with what its worker and worker/rank_watch.py use of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.parallel.group import Arrivals


@dataclass
class FakeRank:
    rank: int = 1
    silent: float = 0.0
    failure: str = ""
    killed: bool = False

    def silent_seconds(self, leader: Arrivals) -> float:
        return math.inf if self.failure else self.silent

    def kill(self) -> None:
        self.killed, self.silent = True, 0.0

    def expect_end(self) -> None:
        pass

    def start_closing(self) -> None:
        pass

    def end(self, seconds: float) -> None:
        pass
