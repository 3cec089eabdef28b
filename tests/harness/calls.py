"""Counts calls: a cost that is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable


def count_calls(function: Callable[[], object]) -> int:
    """How many calls `function` makes, of Python and C functions."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls
