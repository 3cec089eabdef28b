"""Counts the transitions and refusals that a state machine test reaches, so that it fails if one was never reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from cluster.state_machine import StateMachine


class Reached:
    def __init__(self, names: Iterable[str]):
        self.counts: Counter[str] = Counter(dict.fromkeys(names, 0))

    def hit(self, name: str) -> None:
        assert name in self.counts, f"{name} is not among the names"
        self.counts[name] += 1

    def count(self, machine: StateMachine[Any]) -> None:
        """Its transitions from now on, as "old → new"."""
        move = machine.to

        def to(new: Any) -> None:
            old = machine.state
            move(new)
            self.hit(f"{old.value} → {new.value}")

        machine.to = to  # type: ignore[method-assign]

    def check(self) -> None:
        """Fails naming what was never reached. Call it after the whole run."""
        never = sorted(name for name, count in self.counts.items() if not count)
        assert not never, f"never reached: {', '.join(never)}; reached: {dict(self.counts)}"
