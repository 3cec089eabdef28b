"""When an attempt whose answer is complete is over: its workers' reports come with their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from router.dispatch.attempt_events import Complete, Source

if TYPE_CHECKING:
    from router.dispatch.attempt import Attempt

REPORT_SECONDS = 0.3  # for the reports of an answer that a stop string ended


class AwaitedReports:
    """The reports of one attempt. Workers do not look for stop strings: an answer that one ended is cancelled, and waits
    for the report with the prompt's cached tokens alone, until its workers have answered, no longer than
    REPORT_SECONDS."""

    def __init__(self, attempt: Attempt, clean_up: Callable[[Coroutine[Any, Any, None]], None]):
        self._attempt = attempt
        self._clean_up = clean_up
        self._is_cancelled = self._is_late = False

    def are_here(self) -> bool:
        """Whether the attempt is over. Asked when every choice has its end, and after each event from then on."""
        attempt = self._attempt
        workers = {Source.DECODE} if attempt.is_local else {Source.PREFILL, Source.DECODE}
        if workers <= attempt.finished | attempt.failed:
            return True
        if not any(choice.stopped for choice in attempt.choices):
            return False
        if attempt.prefill_report is not None or self._is_late:
            return True
        if not self._is_cancelled:
            self._is_cancelled = True
            self._clean_up(self._cancel())
            asyncio.get_running_loop().call_later(REPORT_SECONDS, self._late)
        return False

    async def _cancel(self) -> None:
        await self._attempt.close()
        self._late()  # behind its answer a worker sends nothing; one of an earlier version answers without the report

    def _late(self) -> None:
        self._is_late = True
        self._attempt.events.add(Complete())
