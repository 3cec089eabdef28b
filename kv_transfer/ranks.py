"""A rank's hand-off endpoint as its leader sees it, in this process or in another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from kv_transfer.messages import FromReceiver, FromSender, PeerRank, ToReceiver, ToSender

log = logging.getLogger(__name__)
E = TypeVar("E")
ToRank = TypeVar("ToRank", contravariant=True)
FromRank = TypeVar("FromRank", covariant=True)


class Rank(Protocol[ToRank, FromRank]):
    @property
    def hello(self) -> PeerRank: ...

    @property
    def is_remote(self) -> bool:
        """Whether messages reach the rank only some time after `handle` has returned."""

    @property
    def staging_used_bytes(self) -> int:
        """0 of a receiving rank, and of one in another process."""

    def start(self, on_event: Callable[[FromRank], None]) -> None:
        """Begin to work. `on_event` may be called on any thread."""

    def handle(self, message: ToRank) -> None: ...

    def close(self) -> None: ...


SendingRank = Rank[ToSender, FromSender]
ReceivingRank = Rank[ToReceiver, FromReceiver]


def on_event_loop(handle: Callable[[E], None]) -> Callable[[E], None]:
    """A callback for ranks' threads that calls `handle` on the running event loop, in order, until the loop closes."""
    loop = asyncio.get_running_loop()

    def call(event: E) -> None:
        try:
            loop.call_soon_threadsafe(handle, event)
        except RuntimeError:
            log.debug("dropped %s of a rank: the event loop has closed", type(event).__name__)

    return call
