"""Counts the transitions and refusals that a state machine test reaches, so that it fails if one was never reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Reached:
    def __init__(self, names: Iterable[str]):
        self.counts: Counter[str] = Counter(dict.fromkeys(names, 0))

    def hit(self, name: str) -> None:
        assert name in self.counts, f"{name} is not among the names"
        self.counts[name] += 1

    def check(self) -> None:
        """Fails naming what was never reached. Call it after the whole run."""
        never = sorted(name for name, count in self.counts.items() if not count)
        assert not never, f"never reached: {', '.join(never)}; reached: {dict(self.counts)}"
