"""Why a worker ends: it has failed, or it was asked to drain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from cluster.errors import BatonError, EngineFailedError
from cluster.membership.types import Then
from worker.ranks.process import RankRaised

RANK_DEATH_SECONDS = 0.25  # between a step that a dead rank broke and the end of its pipe


@dataclass(frozen=True)
class WorkerFailure:
    error: BaseException
    engine: EngineFailedError | None = None  # for the requests of the failed step, if they may be its cause


class Ending:
    """The first failure counts, and the first request to drain. Ranks report to it (worker/ranks/process.py)."""

    def __init__(self, further_ranks: int):
        self._further_ranks = further_ranks  # beside the leader
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[WorkerFailure] = self._loop.create_future()
        self._drain: asyncio.Future[Then] = self._loop.create_future()

    # --- on any thread -----------------------------------------------------------------------------------

    def rank_failed(self, error: Exception) -> None:
        """Fail the worker, which cannot compute without the rank."""
        # An exception in one rank can make another exit, and the exit may be seen first: wait for the exception.
        at_once = isinstance(error, RankRaised) or self._further_ranks == 1
        self._call(self._end_failed if at_once else self.engine_failed, error)

    def rank_leaving(self) -> None:
        self.ask_drain("exit")

    def ask_drain(self, then: Then) -> None:
        """`then`: what its supervisor does once the worker has left."""
        self._call(self._set_drain, then)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: the worker has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    # --- on the loop -------------------------------------------------------------------------------------

    def engine_failed(self, error: BaseException) -> None:
        """Handle an exception of a step or the loss of a rank. Its cause may be reported a moment later."""
        if self._further_ranks:
            self._loop.call_later(RANK_DEATH_SECONDS, self._end_failed, error)
        else:
            self._end_failed(error)

    def _end_failed(self, error: BaseException) -> None:
        """Blame the requests of a failed step, unless the error is a BatonError: then a lost rank or peer is the cause."""
        if isinstance(error, BatonError):
            self.fail(error)
            return
        name = str(error) if isinstance(error, RankRaised) else type(error).__name__
        self.fail(error, EngineFailedError(f"the engine failed while it ran this request: {name}"))

    def fail(self, error: BaseException, engine: EngineFailedError | None = None) -> None:
        if not self._failure.done():
            self._failure.set_result(WorkerFailure(error, engine))

    def _set_drain(self, then: Then) -> None:
        if not self._drain.done():
            self._drain.set_result(then)

    def on_failure(self, callback: Callable[[WorkerFailure], None]) -> None:
        self._failure.add_done_callback(lambda failure: callback(failure.result()))

    @property
    def has_failed(self) -> bool:
        return self._failure.done()

    @property
    def then(self) -> Then:
        """The action after the drain, "exit" unless a request to drain named another."""
        return self._drain.result() if self._drain.done() else "exit"

    async def failure(self) -> BaseException:
        """Wait for the failure."""
        return (await asyncio.shield(self._failure)).error

    async def drain_asked(self) -> Then:
        """Wait for a request to drain."""
        return await asyncio.shield(self._drain)
