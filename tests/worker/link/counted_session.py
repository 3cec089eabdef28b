"""What a link's connection at a worker needs of a session and of a port."""

from __future__ import annotations

from worker.link.connection import Connection
from worker.link.session import State
from worker.link.turns import Dispatching, Handshakes


class CountedSession:
    """Something is always due."""

    router_id = "r"
    state = State.UP
    unread = False

    def __init__(self) -> None:
        self.frames = 0

    def flush(self) -> None:
        self.frames += 1

    def closed(self) -> None:
        """Nothing is kept."""


class AnyPort:
    def __init__(self) -> None:
        self.handshakes = Handshakes()
        self.dispatching = Dispatching()

    def forget(self, connection: Connection) -> None:
        """Nothing is kept."""

    def settled(self, connection: Connection) -> None:
        """Nothing is counted."""
