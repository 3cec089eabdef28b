"""A fake tensor-parallel rank, with what its worker and worker/ranks/watch.py use of it, and a recorder of reports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.parallel.group import Arrivals


@dataclass
class FakeRank:
    rank: int = 1
    silent: float = 0.0
    failure: str = ""
    did: list[str] = field(default_factory=list)  # names of the calls that ended it, in order

    @property
    def killed(self) -> bool:
        return "kill" in self.did

    def silent_seconds(self, leader: Arrivals) -> float:
        return math.inf if self.failure else self.silent

    def kill(self) -> None:
        self.did.append("kill")
        self.silent = 0.0

    def expect_end(self) -> None:
        self.did.append("expect_end")

    def start_closing(self) -> None:
        self.did.append("start_closing")

    def end(self, seconds: float) -> None:
        self.did.append("end")


class Reports:
    """Records what ranks report."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []

    @property
    def said(self) -> list[str]:
        return [str(error) for error in self.failures]

    def rank_failed(self, error: Exception) -> None:
        self.failures.append(error)

    def rank_leaving(self) -> None:
        """No rank leaves here."""
