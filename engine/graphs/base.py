"""The contract of a recorder: it runs a function once and can repeat its operations on the same addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Recording(Protocol):
    def replay(self) -> None:
        """Repeat the operations. They read and write the tensors that the recorded function did; numbers that Python
        computed then are those of then."""


class Recorder(Protocol):
    def record(self, function: Callable[[], None]) -> Recording:
        """Record the operations of `function`, which reads nothing back to the host. It is called twice or more."""
