"""A deadline for the whole answer of a server that is asked which one has the keys."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import redis


@contextlib.contextmanager
def closed_when_late(client: Callable[[], redis.Redis | None], seconds: float) -> Iterator[None]:
    """Close the client's connections after `seconds`, and again after as many, until the block ends. The time-out of
    redis-py is per read, and an answer may come a byte at a time. `client` returns None while there is none."""
    answered = threading.Event()

    def watch() -> None:
        while not answered.wait(seconds):
            if (late := client()) is not None:
                late.connection_pool.disconnect()

    threading.Thread(target=watch, name="redis-deadline", daemon=True).start()
    try:
        yield
    finally:
        answered.set()
