"""An event loop whose clock all but stands still while anything is to be done, and then jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
TURN_SECONDS = 1e-9  # a turn of the loop takes some time, or a rounding error would be slept over for ever


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Instead of waiting it moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0  # as on a machine that has been up for a while

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("every task waits and no timer is set")
        self.now += max(TURN_SECONDS, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """For what waits for time and for other tasks only: no sockets, threads or processes."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def pass_time(self, seconds: float) -> None:
        """Everything that is due meanwhile happens, in its order."""
        self.run_until_complete(asyncio.sleep(seconds))

    def stand_still(self, seconds: float) -> None:
        """Advance the clock as if a callback had blocked the loop."""
        self._virtual.now += seconds

    def settle(self, turns: int = 8) -> None:
        """What can go on without time passing goes on."""
        for _ in range(turns):
            self.run_until_complete(asyncio.sleep(0))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.run_until_complete(coroutine)
