"""Counts tokens and the time between them."""

from __future__ import annotations

import asyncio
import time

from cluster.telemetry.histogram import Histogram
from router.observe.live.report import Recorder


class TokenTimes:
    """The gaps of one turn of the event loop are counted together, and end at one time: those of a step of the worker are
    then equal, and counted as one."""

    def __init__(self, recorder: Recorder, inter_token_seconds: Histogram):
        self._recorder = recorder
        self._inter_token_seconds = inter_token_seconds
        self._gaps: list[float] = []  # of this turn
        self._now = 0.0  # while there are any

    def now(self) -> float:
        """The time of the tokens that come in this turn; monotonic seconds."""
        if not self._gaps:
            self._now = time.monotonic()
        return self._now

    def first(self, seconds: float | None) -> None:
        """A choice's first token; `seconds`: from the request's arrival, if no choice had one before."""
        self._recorder.first_token(seconds)

    def gap(self, seconds: float, trace_id: str) -> None:
        """A further token, `seconds` after the choice's last one."""
        if not self._gaps:
            asyncio.get_running_loop().call_soon(self._count)
        self._gaps.append(seconds)
        if trace_id:
            self._inter_token_seconds.note(seconds, trace_id)

    def _count(self) -> None:
        gaps, self._gaps = self._gaps, []
        self._recorder.tokens(gaps)
        self._inter_token_seconds.observe_all(gaps)
