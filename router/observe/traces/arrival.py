"""When a request arrived, and the trace that its headers name."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


def _nothing(name: str) -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Arrival:
    """`values(name)`: of a header, or of a metadata entry; read only where requests are traced."""

    values: Callable[[str], Sequence[str]] = _nothing
    received: float = field(default_factory=time.monotonic)

    @property
    def trace_headers(self) -> dict[str, str]:
        """By W3C's rules: a second traceparent makes both invalid, several tracestates are one list."""
        parents = self.values("traceparent")
        if len(parents) != 1:
            return {}
        return {"traceparent": parents[0], "tracestate": ",".join(self.values("tracestate"))}
