"""Poll conditions with generous deadlines: a busy machine is no failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

# Called without arguments; a lambda in a loop binds the loop's variable as a default.
Check = Callable[..., object]


def wait_for(check: Check, seconds: float, what: str) -> Any:
    """Polls until `check` is truthy; the last exception, if any, explains the failure."""
    deadline = time.monotonic() + seconds
    problem: BaseException | None = None
    while time.monotonic() < deadline:
        try:
            if result := check():
                return result
        except Exception as error:
            problem = error
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}") from problem


async def until(check: Check, what: str, seconds: float = 60.0) -> None:
    """As `wait_for`, without blocking the loop."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        await asyncio.sleep(0.005)


async def turns(count: int = 5) -> None:
    """What is due in the next turns of the event loop happens."""
    for _ in range(count):
        await asyncio.sleep(0)
