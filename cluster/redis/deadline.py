"""A deadline for the whole answer of a Sentinel or of a cluster's node."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import redis


@contextlib.contextmanager
def closed_when_late(client: redis.Redis, seconds: float) -> Iterator[None]:
    """Close the client's connections after `seconds`, and again after as many, until the block ends. The time-out of
    redis-py is per read, and an answer may come a byte at a time."""
    answered = threading.Event()

    def watch() -> None:
        while not answered.wait(seconds):
            client.connection_pool.disconnect()

    threading.Thread(target=watch, name="redis-deadline", daemon=True).start()
    try:
        yield
    finally:
        answered.set()
