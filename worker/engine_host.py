"""The thread that owns an engine.

The asyncio loop never touches the engine: it queues functions, which run between two steps, and gets each step's output
by a callback. So the loop never blocks a step, and a step never waits for the loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import TypeVar

from cluster.errors import DeadlineError, DrainingError
from cluster.fair_threads import FairThreads
from cluster.grammar.spec import GrammarSpec
from engine.compiled_grammar import CompiledGrammar
from engine.engine import Engine
from engine.parallel.group import LostRankError
from engine.request import EngineRequest, StepOutput
from worker.engine_commands import CommandQueue

T = TypeVar("T")
log = logging.getLogger(__name__)
ROOM_SECONDS = 0.005
ROUND_SECONDS = 0.005  # of commands between two steps
JOIN_POLL_SECONDS = 0.1
# A third of the weight of other threads: a tenant that sends a new grammar with each request would slow down all steps.
COMPILE_NICE = 5
GRAMMAR_SECONDS = 10.0  # one takes less than a second; they are compiled one after another, tenants in turn
LAST_SECONDS = 2.0  # join time for a thread whose engine has failed or hangs


@dataclass(eq=False)
class EngineHost:
    """Runs one engine on its own thread.

    `on_output` is called on the loop after every step with results. `on_failure` is called on the loop once, if a step
    raises: a failed engine makes no further step, and its process should end.
    """

    engine: Engine
    worker_id: str = ""
    _: KW_ONLY
    on_output: Callable[[StepOutput], None]
    on_failure: Callable[[BaseException], None]
    step_stall_seconds: float
    ranks_answer: Callable[[], bool] = lambda: True
    use_thread: Callable[[], None] = lambda: None  # called first, on the thread
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._commands = CommandQueue()
        self._compiling = FairThreads(1, "grammars", nice=COMPILE_NICE)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._refusing = threading.Lock()
        self._failed: BaseException | None = None
        self._busy_since: float | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step in progress and refuse waiting commands. A thread that hangs is abandoned."""
        self._commands.put(None)
        self._compiling.close()
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        deadline = self.clock() + self.step_stall_seconds
        while self._thread.is_alive() and self.healthy() and self.clock() < deadline:
            self._thread.join(JOIN_POLL_SECONDS)
        self._thread.join(LAST_SECONDS)

    @property
    def ended_well(self) -> bool:
        """After `stop`: no step failed, none still runs."""
        return self._failed is None and not self._thread.is_alive()

    @property
    def steps(self) -> int:
        return self.engine.steps

    def healthy(self) -> bool:
        """False if the engine failed, if a step takes longer than `step_stall_seconds`, or while a rank is silent."""
        if self._failed is not None or not self.ranks_answer():
            return False
        since = self._busy_since
        return since is None or self.clock() - since < self.step_stall_seconds

    def full(self) -> bool:
        return self.engine.full

    def busy_seconds(self) -> float:
        """Duration of the step in progress; 0 between steps."""
        since = self._busy_since
        return self.clock() - since if since is not None else 0.0

    def in_failed_step(self, request_id: str) -> bool:
        """After a failure: whether the step that failed computed this request. True for every request if it failed while
        it was scheduled."""
        items = self.engine.step_items
        return not items or any(item.request_id == request_id for item in items)

    async def call(self, function: Callable[[Engine], T], *, behind: bool = False) -> T:
        """Run `function(engine)` between two steps, in order or `behind` others; return its result, or raise its error.

        Raises DrainingError once the engine has stopped, so that the router tries another worker.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def command(refusal: DrainingError | None = None) -> None:
            try:
                if refusal is not None:
                    raise refusal
                result = function(self.engine)
            except BaseException as error:  # raised in the caller of `call`
                loop.call_soon_threadsafe(_set_exception, future, error)
                if isinstance(error, LostRankError):  # no request's, as in a step
                    raise
            else:
                loop.call_soon_threadsafe(_set_result, future, result)

        if self._stopping or self._failed is not None:
            raise _stopped()
        self._commands.put(command, behind=behind)
        if self._stopping:  # since the check above: the thread may have refused the waiting commands already
            self._refuse_the_rest()
        return await future

    def has_grammar(self, grammar: GrammarSpec, tenant: str) -> bool:
        """Whether it is compiled for the tenant already."""
        return self.engine.grammars.find(grammar, tenant) is not None

    async def compile_grammar(
        self, grammar: GrammarSpec, tenant: str, seconds: float = GRAMMAR_SECONDS
    ) -> CompiledGrammar:
        """Compile a request's grammar off the loop and off the engine's thread, for the request to hold. Raises
        DeadlineError, InvalidRequestError, ModelError; DrainingError once the engine stops."""
        grammars = self.engine.grammars
        if (found := grammars.find(grammar, tenant)) is not None:
            return found
        limit = min(seconds, GRAMMAR_SECONDS)
        try:
            async with asyncio.timeout(limit):
                return await self._compiling.run(tenant, grammars.get, grammar, tenant)
        except TimeoutError:
            raise DeadlineError(
                f"grammar: it was not compiled within {limit:.1f} s", field="grammar"
            ) from None

    def _run(self) -> None:
        try:
            self.use_thread()
            while not self._stopping:
                self._run_commands()
                if not self._stopping and self.engine.has_work:
                    steps = self.engine.steps
                    self._step()
                    if self.engine.steps == steps:
                        # No waiting request could get blocks: let the threads that free them have the interpreter.
                        self._run_command(block=True, seconds=ROOM_SECONDS)
        except BaseException as error:
            log.exception("%s: the engine failed", self.worker_id)
            self._failed = error
            self._notify(self.on_failure, error)
        finally:
            self._stopping = True
            self._refuse_the_rest()

    def _run_commands(self) -> None:
        """Wait for commands while the engine has nothing to do, else run those that wait, for ROUND_SECONDS: some come
        again as soon as they are refused."""
        while not self.engine.has_work:
            if not self._run_command(block=True):
                return
        end = self.clock() + ROUND_SECONDS
        for _ in range(len(self._commands)):
            if not self._run_command(block=False) or self.clock() >= end:
                return

    def _run_command(self, *, block: bool, seconds: float | None = None) -> bool:
        """Run the next command. Returns False if there is none, or the thread is to stop."""
        try:
            command = self._commands.get(block, seconds)
        except queue.Empty:
            return False
        if command is None:
            self._stopping = True
            return False
        command()
        return True

    def _step(self) -> None:
        self._busy_since = self.clock()
        output = self.engine.step()
        self._busy_since = None
        if not output.is_empty:
            self._notify(self.on_output, output)

    def _notify(self, callback: Callable[[T], None], argument: T) -> None:
        assert self._loop is not None, "start() comes first"
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:  # the loop has closed
            self._stopping = True

    def _refuse_the_rest(self) -> None:
        with self._refusing:
            while True:
                try:
                    command = self._commands.get(block=False)
                except queue.Empty:
                    return
                if command is not None:  # a commit would succeed on an engine that makes no further step
                    command(_stopped())


def _stopped() -> DrainingError:
    return DrainingError("the engine of this worker has stopped")


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def must_compile(host: EngineHost, grammar: GrammarSpec | None, tenant: str) -> bool:
    """Whether the tenant's request with this grammar waits for its compile."""
    return grammar is not None and not host.has_grammar(grammar, tenant)


async def with_grammar(host: EngineHost, request: EngineRequest, seconds: float) -> EngineRequest:
    """The request with its grammar, if it has one, compiled within `seconds`. Raises as `compile_grammar` does."""
    if request.grammar is None:
        return request
    return replace(request, compiled=await host.compile_grammar(request.grammar, request.tenant, seconds))
