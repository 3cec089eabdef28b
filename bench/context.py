"""The input of every section."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console

from bench import checkpoint, limits
from bench.limits import Limits


@dataclass(frozen=True)
class Context:
    """`quick` shortens every run: its figures are no results."""

    out: Path
    console: Console
    quick: bool = False

    @cached_property
    def model(self) -> Path:
        """The random checkpoint, written on first use."""
        return checkpoint.write(self.out / "model").absolute()

    @cached_property
    def limits(self) -> Limits:
        self.say("measuring the machine's limits")
        return limits.measure(3 if self.quick else 7)

    def say(self, line: str) -> None:
        self.console.print(f"[dim]{line}[/dim]", highlight=False)

    def repeats(self, count: int) -> int:
        return max(1, count // 3) if self.quick else count

    def seconds(self, seconds: float) -> float:
        return seconds / 6 if self.quick else seconds
