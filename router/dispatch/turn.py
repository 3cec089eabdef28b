"""Calls of one turn of the event loop, made together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class Turn:
    """Collects calls and makes them after what the present turn still has to do, all in one callback of the event loop: of
    hundreds of streams that get a token by one frame, each would need a callback of its own."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def add(self, call: Callable[[], None]) -> None:
        if not self._calls:
            asyncio.get_running_loop().call_soon(self._make)
        self._calls.append(call)

    def _make(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except Exception:  # the others are other requests'
                log.exception("a call at the end of a turn failed")
