"""A rank's endpoint that answers every message."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kv_transfer.messages import Confirmed, NewEpoch, PeerRank, Wake
from worker.ranks.pipe import RankHello

HELLO = RankHello(PeerRank(1, "agent", b""), [])
HANG, BREAK = Wake(), NewEpoch(0)


class Echo:
    """An endpoint that answers with the size of each message."""

    hello = HELLO.peer
    is_remote = False
    staging_used_bytes = 0

    def start(self, on_event: Callable[[Any], None]) -> None:
        self.on_event = on_event

    def handle(self, message: Any) -> None:
        if message == HANG:
            threading.Event().wait()
        if message == BREAK:
            raise KeyError("a fault of ours")
        self.on_event(Confirmed(len(message.payload), b""))

    def close(self) -> None:
        return
