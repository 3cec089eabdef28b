"""The grammar masks of a step's rows, filled on a thread of their own while the device or other cores compute the step.

    schedule ─► prepare ─► forward pass ─► late ─► of ─► draw
                   └─────► accept the last token, fill ─┘

No step waits long for masks, as it is the other requests' too: a sequence whose mask is not there by then waits until it
is, and steps go on without it. The first mask of a request is filled before its prompt is computed. Tenants take turns on
the thread; grammars whose masks take long have another one.

The matcher of a sequence is made when its first mask is needed, from the output so far, and follows the output from then
on. So it is right after a hand-off, after a preemption and where a stream is resumed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from weakref import WeakKeyDictionary

import numpy as np

from cluster.errors import (
    EngineBusyError,
    EngineRequestError,
    GrammarDeadEndError,
    InvalidRequestError,
    engine_request_error,
)
from cluster.round_robin import RoundRobin
from engine.compiled_grammar import CompiledGrammar, Words
from engine.sampling.grammar.base import RETRY_SECONDS, word_count
from engine.sampling.grammar.store import Grammars
from engine.scheduler.sequence import Sequence, SequenceState

MASK_SECONDS = 1.0  # of processor time for one mask
WALL_SECONDS = 10.0  # of a thread that waits, or does not get the processor
SLOW_SECONDS = 0.02  # of processor time: a grammar with such a mask waits with others of its kind
# So many times what the mask took: of what the quick ones wait for, slow masks are a small part.
SLOW_TIMES = 50
POLL_SECONDS = 0.05
REST_SECONDS = 0.005  # where nothing else can be computed
# Of a step, the part of the last step's time for which it waits for masks, and the least
STEP_PART, STEP_SECONDS = 0.25, 0.002


class _Followed:
    """A sequence's matcher, and how much of its output the matcher has accepted."""

    def __init__(self, compiled: CompiledGrammar, vocab: int):
        self.compiled = compiled
        self.matcher = compiled.matcher()
        self.accepted = 0
        # The last mask. Its draw copies it before the next one is filled.
        self.words: Words = np.zeros(word_count(vocab), dtype=np.int64)


class _Run:
    """One mask that the calling thread fills. Its processor time decides: on a busy machine one of 0.4 ms took 1 s."""

    def __init__(self, future: Future[Words], compiled: CompiledGrammar | None):
        self.future = future
        self.compiled = compiled  # None: it may be compiled now
        # macOS has no clock of another thread: there the time of all threads counts
        clock = getattr(time, "pthread_getcpuclockid", None)
        self._clock = clock(threading.get_ident()) if clock else time.CLOCK_PROCESS_CPUTIME_ID
        self._computed, self._began = time.clock_gettime(self._clock), time.monotonic()

    def failure(self) -> EngineRequestError | None:
        """Why it is given up. None: it is not. Ask while the thread fills it: its clock ends with it."""
        if time.clock_gettime(self._clock) - self._computed >= MASK_SECONDS:
            return GrammarDeadEndError(
                "grammar: the tokens that it allows next take too long to find",
                field="grammar",
                limit=f"{MASK_SECONDS:g} s of processor time",
            )
        if time.monotonic() - self._began < WALL_SECONDS:
            return None
        limit = f"{WALL_SECONDS:g} s"  # of which it computed for a small part: no fault of the grammar's
        return EngineBusyError(
            f"grammar: the tokens that it allows next were not found within {limit}: this worker is too busy",
            field="grammar",
            limit=limit,
            retry_after_seconds=RETRY_SECONDS,
        )


class _Filler:
    """A thread that fills masks, by tenants in turns. One that takes too long fails, and another thread goes on."""

    def __init__(self) -> None:
        self._waiting = RoundRobin[tuple[Sequence, Future[Words]]]()
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._runs: _Run | None = None

    def begin(self, masks: GrammarMasks, sequence: Sequence) -> Future[Words]:
        future = Future[Words]()
        with self._lock:
            self._waiting.push(sequence.request.tenant, (sequence, future))
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar-masks")
        try:
            self._thread.submit(self._fill_next, masks)
        except RuntimeError:
            with self._lock:
                self._fail_waiting()
        return future

    def _fail_waiting(self) -> None:
        """The system has no further thread, so none of these would be filled. That must not end the engine."""
        while self._waiting:
            _, future = self._waiting.pop()
            future.set_exception(
                EngineBusyError(
                    "grammar: this worker can start no thread now, which finds the tokens that it allows",
                    field="grammar",
                    retry_after_seconds=RETRY_SECONDS,
                )
            )

    def _fill_next(self, masks: GrammarMasks) -> None:
        with self._lock:
            if not self._waiting:  # the thread that has been given up has ended after all, and filled it
                return
            sequence, future = self._waiting.pop()
            self._runs = _Run(future, sequence.request.compiled)
        result: Words | None = None
        error = EngineRequestError("the request has ended")
        if sequence.state is not SequenceState.FINISHED:
            try:
                result = masks.filled(sequence)
            except EngineRequestError as failed:
                error = _without_frames(failed)
        with self._lock:
            if self._runs is not None and self._runs.future is future:
                self._runs = None
            if future.done():  # given up
                return
            if result is None:
                future.set_exception(error)
            else:
                future.set_result(result)

    def give_up(self, masks: GrammarMasks) -> None:
        """End a mask that takes too long, with an error; its thread is abandoned."""
        with self._lock:
            run = self._runs
            if run is None or (failure := run.failure()) is None:
                return
            self._runs = None
            masks.took(run.compiled, MASK_SECONDS)
            run.future.set_exception(failure)
            if self._thread is not None:
                self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = ThreadPoolExecutor(1, "grammar-masks")
            try:
                for _ in range(len(self._waiting)):
                    self._thread.submit(self._fill_next, masks)
            except RuntimeError:
                self._fail_waiting()


def _without_frames(error: EngineRequestError) -> EngineRequestError:
    """The error without its frames: these name the sequence, which would live as long as the future that is kept."""
    chain, cause = set[BaseException](), error.__cause__ or error.__context__
    error.__traceback__ = None
    while cause is not None and cause not in chain:  # an error that is raised from itself is its own cause
        chain.add(cause)
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


class GrammarMasks:
    """`active`: whether requests may have a grammar; while it is False, steps skip all work for masks."""

    def __init__(self, grammars: Grammars, vocab: int):
        self.active = False
        self._grammars = grammars
        self._vocab = vocab
        self._followed = WeakKeyDictionary[Sequence, _Followed]()
        self._filling = WeakKeyDictionary[Sequence, Future[Words]]()
        self._waiting = WeakKeyDictionary[Sequence, None]()  # their flag `awaits_mask` is set
        self._slow_until = WeakKeyDictionary[CompiledGrammar, float]()  # monotonic seconds
        self._quick, self._slow = self._fillers = _Filler(), _Filler()
        self._allowed = STEP_SECONDS
        self.waited_seconds = 0.0  # of this step

    @property
    def any_waits(self) -> bool:
        return bool(self._waiting)

    def prepare(self, sequences: Iterable[Sequence]) -> None:
        """Begin to fill the masks of sequences with a grammar, for the draws of this step."""
        for sequence in sequences:
            if sequence not in self._filling:
                self._filling[sequence] = self._filler_of(sequence).begin(self, sequence)

    def _filler_of(self, sequence: Sequence) -> _Filler:
        followed = self._followed.get(sequence)
        compiled = sequence.request.compiled if followed is None else followed.compiled
        if compiled is None or self._slow_until.get(compiled, 0.0) < time.monotonic():
            return self._quick
        return self._slow

    def begin_step(self, last_seconds: float) -> None:
        """`last_seconds`: what the last step took, but for waits for masks."""
        self._allowed = max(STEP_SECONDS, STEP_PART * last_seconds)
        self.waited_seconds = 0.0

    def late(self, sequences: Seq[Sequence]) -> set[Sequence]:
        """Wait for masks as long as the step may still wait. The sequences whose masks are not there then wait for them:
        `look` ends that."""
        begun = {one: self._filling[one] for one in sequences if one in self._filling}
        filling = {future: one for one, future in begun.items() if not future.done()}
        if filling:
            began = time.monotonic()
            wait(filling, max(0.0, self._allowed - self.waited_seconds))
            self.waited_seconds += time.monotonic() - began
        late = {one for future, one in filling.items() if not future.done()}
        for one in late:
            self._wait(one)
        return late

    def look(self, waiting: Iterable[Sequence]) -> None:
        """Begin to fill the masks of sequences that have come or were preempted. Those whose masks have been filled, or
        have failed, may be computed."""
        for sequence in waiting:
            if sequence.awaits_mask and sequence not in self._waiting:
                self.prepare([sequence])
                self._wait(sequence)
        if not self._waiting:
            return
        self._give_up()
        for sequence in list(self._waiting):
            future = self._filling.get(sequence)
            if sequence.state is SequenceState.FINISHED:
                self._filling.pop(sequence, None)
            elif future is not None and not future.done():
                continue
            sequence.awaits_mask = False
            del self._waiting[sequence]

    def rest(self) -> bool:
        """Wait for one of the masks that sequences wait for, for REST_SECONDS. Returns whether there is one now."""
        filling = [self._filling[one] for one in self._waiting if one in self._filling]
        return bool(filling and wait(filling, REST_SECONDS, return_when=FIRST_COMPLETED).done)

    def of(self, sequence: Sequence) -> Words | None:
        """The mask for the token after the sequence's last one; None without a grammar. Raises EngineRequestError."""
        if sequence.request.grammar is None:
            return None
        self.prepare([sequence])
        future = self._filling.pop(sequence)
        while not (future.done() or wait([future], POLL_SECONDS).done):
            self._give_up()
        return future.result()

    def filled(self, sequence: Sequence) -> Words:
        """Fill the mask of a sequence, on a filler's thread. Raises EngineRequestError."""
        try:
            followed = self._followed.get(sequence)
            compiled = self._compiled(sequence) if followed is None else followed.compiled
            began = time.thread_time()
            try:
                return self._next(sequence, followed, compiled)
            finally:
                self.took(compiled, time.thread_time() - began)
        except InvalidRequestError as error:
            raise EngineRequestError(error.message, field="grammar") from error
        except Exception as error:
            raise engine_request_error(error) from error
        except BaseException as error:  # the library's panics; one must not end the engine
            raise EngineRequestError(f"grammar: {type(error).__name__}", field="grammar") from error

    def _next(self, sequence: Sequence, followed: _Followed | None, compiled: CompiledGrammar) -> Words:
        if followed is None:
            followed = self._followed[sequence] = _Followed(compiled, self._vocab)
        output = sequence.tokens[sequence.num_prompt :]
        followed.matcher.accept(output[followed.accepted :])
        followed.accepted = len(output)
        followed.matcher.fill(followed.words)
        return followed.words

    def took(self, compiled: CompiledGrammar | None, seconds: float) -> None:
        """A mask of this grammar took so many seconds of processor time, or has failed after them. Any thread."""
        if compiled is not None and seconds > SLOW_SECONDS:
            self._slow_until[compiled] = time.monotonic() + SLOW_TIMES * seconds

    def _give_up(self) -> None:
        for filler in self._fillers:
            filler.give_up(self)

    def _wait(self, sequence: Sequence) -> None:
        sequence.awaits_mask = True
        self._waiting[sequence] = None

    def _compiled(self, sequence: Sequence) -> CompiledGrammar:
        """The request's compiled grammar: workers compile it before they add the request, so that no step waits for it."""
        request = sequence.request
        assert request.grammar is not None, "only sequences with one have masks"
        if request.compiled is not None:
            return request.compiled
        return self._grammars.get(request.grammar, request.tenant)
