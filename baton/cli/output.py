"""The console of all commands: one, so that progress bars and lines do not tear each other."""

from __future__ import annotations

import contextlib

from rich.console import Console

# What is printed is others' text: paths, addresses, answers. Nothing in it is rich's own markup, or a name of an emoji.
console = Console(highlight=False, markup=False, emoji=False)


def say(line: str) -> None:
    console.print(line, soft_wrap=True)


def tell(line: str) -> None:
    """Print a line beside work that goes on whether it can be read or not: a full disk behind the output, or a pipe whose
    reader has left, must not end a process that serves or drains."""
    with contextlib.suppress(OSError, SystemExit):  # SystemExit: what rich makes of such a pipe
        say(line)


def progress_console() -> Console:
    """The console for progress: it is no part of a command's output, so it is on stderr."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)
