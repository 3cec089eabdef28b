"""The contract of a recorder: it runs a function once and can repeat its operations on the same addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Recording(Protocol):
    def replay(self) -> None:
        """Repeat the operations on the tensors that the function read and wrote. Numbers that Python computed while it was
        recorded are not computed again."""


class Recorder(Protocol):
    def record(self, function: Callable[[], None]) -> Recording:
        """Record the operations of `function`, which must read nothing back to the host. It is called at least twice: the
        first call may compile kernels."""
