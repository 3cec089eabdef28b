"""A rank's hand-off endpoint as its leader sees it, in this process or another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kv_transfer.messages import PeerRank


class Rank(Protocol):
    """`on_event` may be called on any thread."""

    on_event: Callable[[Any], None]

    @property
    def hello(self) -> PeerRank: ...

    def handle(self, message: Any) -> None: ...

    def close(self) -> None: ...
