"""What commands print: one console, so that progress and lines do not tear each other."""

from __future__ import annotations

from rich.console import Console

console = Console(highlight=False)


def say(line: str) -> None:
    console.print(line, soft_wrap=True)
