"""The life of an attempt at the decode worker: expected, reserved, decoding, ended."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from cluster.errors import (
    BatonError,
    CancelledError,
    DrainingError,
    EngineFailedError,
    StaleEpochError,
    engine_request_error,
)
from cluster.faults.points import Point
from decode_worker import attempt_trace
from decode_worker.attempt import DecodeAttempt, DecodeState
from engine.request import EngineRequest, RequestDone, StepOutput, TokenOutput
from kv_transfer.contract import HandoffState
from kv_transfer.decode_side.receiver import HandoffReceiver
from wire import common_pb2, decode_pb2
from worker.admission import Admission
from worker.arrivals import Arrivals
from worker.attempt_log import MAX_UNREAD_TOKENS, AttemptLog
from worker.attempts import Attempts
from worker.convert import outcome_counts, outcome_name, request_from_wire, token_to_wire
from worker.core import WorkerCore
from worker.validate import check_spec

log = logging.getLogger(__name__)


class DecodeRole:
    """Policy around one engine: what routers ask of it, and what they hear."""

    def __init__(self, core: WorkerCore):
        self._core = core
        self.receiver: HandoffReceiver | None = None  # set once, by whoever builds the pair
        self.attempts: Attempts[DecodeAttempt] = Attempts(
            cancel=self.cancel, max_attempts=core.config.max_queued_requests
        )
        self.by_engine_id: dict[str, DecodeAttempt] = {}
        self._at_tokens = core.faults.point(Point.DECODE_TOKENS)
        self._at_done = core.faults.point(Point.DECODE_DONE)
        self.ended = outcome_counts()  # attempts
        self.admission = Admission(2 * core.config.engine.max_batch_tokens, core.config.batch_aging_seconds)
        self.arrivals = Arrivals()  # of requests that are prefilled here

    # --- the router's side -----------------------------------------------------------------------------

    def attach(self, request: decode_pb2.AttachRequest) -> DecodeAttempt:
        known = self.attempts.get(request.transfer_id)
        if known is not None:
            return known
        self._core.check_epoch(request.worker_epoch)
        self._core.check_accepting()
        attempt = self.open(request.transfer_id, request.request_id)
        self._forget_unless_reserved(attempt, (request.admission_deadline_ms or 30_000) / 1000)
        return attempt

    def run(self, request: decode_pb2.DecodeRunRequest) -> DecodeAttempt:
        """Local prefill: the whole request in this engine, once it is its turn. Raises BatonError."""
        known = self.attempts.get(request.transfer_id)
        if known is not None:
            return known
        self._core.check_epoch(request.worker_epoch)
        self._core.check_accepting()
        check_spec(request.spec, self._core.spec_limits)
        asked = request_from_wire(request.transfer_id.hex(), request.spec)
        attempt = self.open(request.transfer_id, request.request_id)
        attempt.local = True
        self.arrivals.came(len(asked.prompt_tokens) + len(asked.output_tokens))
        attempt.trace = self._core.trace_of(request.spec)
        patience = (request.admission_deadline_ms or 30_000) / 1000
        entering = self._enter_in_turn(attempt, asked, patience)
        attempt.entering = asyncio.get_running_loop().create_task(entering)
        return attempt

    def check_abort(self, request: decode_pb2.AbortRequest) -> None:
        """Raise StaleEpochError if the attempt belongs to an earlier epoch of this worker.

        Everything of that epoch has ended, so no commit remains that the router could read. The transfer id is
        remembered as ended, so that a late Attach or Run does not start it.
        """
        try:
            self._core.check_epoch(request.worker_epoch)
        except StaleEpochError:
            self.attempts.remember_ended(request.transfer_id)
            raise

    async def abort(self, transfer_id: bytes, reason: BatonError | None = None) -> HandoffState:
        """Abort the attempt for good unless it has committed (also if it has finished since); return its state."""
        attempt = self.attempts.get(transfer_id)
        if attempt is not None and attempt.committed:
            return HandoffState.COMMITTED
        assert self.receiver is not None, "the receiver is set before the server starts"
        state = await self.receiver.abort(transfer_id)
        if state is not HandoffState.COMMITTED:
            self.attempts.remember_ended(transfer_id)
            self.end(transfer_id, common_pb2.ATTEMPT_OUTCOME_ABORTED, reason)
        return state

    async def cancel(self, attempt: DecodeAttempt) -> None:
        """Ends an attempt at once, committed or not; returns when its blocks are free."""
        state = await self.abort(attempt.transfer_id)
        if state is HandoffState.COMMITTED:
            engine_id = attempt.engine_id
            await self._core.host.call(lambda engine: engine.abort(engine_id))
            error = CancelledError("cancelled")
            self.end(attempt.transfer_id, common_pb2.ATTEMPT_OUTCOME_CANCELLED, error)

    async def cancel_by_router(self, transfer_id: bytes) -> bool:
        """Whether there was such an attempt. Either way it is over for good, and its record is gone."""
        attempt = self.attempts.get(transfer_id)
        if attempt is None:
            # Before anything is waited for: its Attach may be on its way, and would open what nobody reads.
            self.attempts.remember_ended(transfer_id)
            await self._core.follow_ups.complete(self.abort(transfer_id))
            return False
        await self.attempts.cancel(attempt)
        return True

    # --- draining ---------------------------------------------------------------------------------------

    def idle(self) -> bool:
        return len(self.attempts) == 0

    async def give_back_waiting(self) -> None:
        """Nothing of these is here yet: their hand-off has not been asked for."""
        for attempt in self.attempts.all():
            if attempt.machine.state is DecodeState.EXPECTED:
                await self._give_back(attempt)

    async def give_back_running(self) -> None:
        for attempt in self.attempts.all():
            await self._give_back(attempt)

    async def _give_back(self, attempt: DecodeAttempt) -> None:
        """What was computed so far is in the log before its end: the router goes on behind it."""
        error = DrainingError(f"{self._core.worker_id} is leaving")
        if attempt.machine.state not in (DecodeState.DECODING, DecodeState.ENDED):
            await self.abort(attempt.transfer_id, error)
        if attempt.machine.state is DecodeState.DECODING:  # perhaps only since then
            engine_id = attempt.engine_id
            await self._core.host.call(lambda engine: engine.abort(engine_id))
            self.end(attempt.transfer_id, common_pb2.ATTEMPT_OUTCOME_PREEMPTED, error)

    def failed(self, word: BatonError) -> None:
        """End attempts without calling the engine, which has failed: with an EngineFailedError only those of its step."""
        for attempt in self.attempts.all():
            name = attempt.engine_id
            in_step = name in self.by_engine_id and self._core.host.in_failed_step(name)
            if in_step or not isinstance(word, EngineFailedError):
                self.end(attempt.transfer_id, common_pb2.ATTEMPT_OUTCOME_ABORTED, word)

    # --- the engine's side -----------------------------------------------------------------------------

    def on_output(self, output: StepOutput) -> None:
        """Hears of every engine step, on the loop."""
        if output.tokens:
            self._at_tokens(output.tokens[0].request_id)
        for token in output.tokens:
            attempt = self.by_engine_id.get(token.request_id)
            if attempt is None:
                continue
            try:
                self._token(attempt, token, output.began)
            except Exception as error:
                self._failed(attempt, error)
        for done in output.done:
            attempt = self.by_engine_id.get(done.request_id)
            if attempt is None:
                continue
            try:
                self._done(attempt, done)
            except Exception as error:
                self._failed(attempt, error)
        for engine_id in output.evicted_reservations:
            self._core.spawn(self._evicted(bytes.fromhex(engine_id)))

    def _token(self, attempt: DecodeAttempt, token: TokenOutput, step_began: float) -> None:
        if attempt.token_came(step_began) and attempt.local:
            self.arrivals.first_token(attempt.first_token_seconds)
        self._leave(attempt)
        attempt.log.add(token_to_wire(token))
        self._pause_if_unread(attempt)

    def _failed(self, attempt: DecodeAttempt, error: Exception) -> None:
        """End one attempt after an exception in its own work; the rest of the output belongs to other attempts."""
        log.error(
            "attempt %s failed",
            attempt.transfer_id.hex(),
            extra={"request_id": attempt.request_id},
            exc_info=error,
        )
        self._core.spawn(self._core.host.call(lambda engine: engine.abort(attempt.engine_id)))
        self.end(attempt.transfer_id, common_pb2.ATTEMPT_OUTCOME_ABORTED, engine_request_error(error))

    def _done(self, attempt: DecodeAttempt, done: RequestDone) -> None:
        self._at_done(done.request_id)
        if attempt.local:
            attempt.report.cached_tokens = done.cached_tokens
            attempt.report.computed_prompt_tokens = done.computed_prompt_tokens
            attempt.report.prompt_compute_seconds = done.prompt_compute_seconds
            attempt.chunks = done.chunks
        outcome = common_pb2.ATTEMPT_OUTCOME_PREEMPTED if done.preempted else common_pb2.ATTEMPT_OUTCOME_DONE
        if done.error is not None:
            outcome = common_pb2.ATTEMPT_OUTCOME_ABORTED
        self.end(attempt.transfer_id, outcome, done.error)

    async def _evicted(self, transfer_id: bytes) -> None:
        """The engine took a reservation's blocks back for requests that already run."""
        await self.abort(transfer_id)

    def _pause_if_unread(self, attempt: DecodeAttempt) -> None:
        if not attempt.paused and attempt.log.unread_tokens > MAX_UNREAD_TOKENS * attempt.choices:
            attempt.paused = True
            self._core.spawn(self._core.host.call(lambda engine: engine.pause(attempt.engine_id)))

    def resume(self, attempt: DecodeAttempt) -> None:
        """The reader has caught up."""
        if attempt.paused:
            attempt.paused = False
            self._core.spawn(self._core.host.call(lambda engine: engine.resume(attempt.engine_id)))

    # --- shared ----------------------------------------------------------------------------------------

    def open(self, transfer_id: bytes, request_id: str) -> DecodeAttempt:
        attempt = DecodeAttempt(transfer_id, request_id, AttemptLog(self._core.beat_step))
        attempt.report.worker_id = self._core.worker_id
        self.attempts.open(attempt)
        return attempt

    async def _enter_in_turn(
        self, attempt: DecodeAttempt, request: EngineRequest, patience_seconds: float
    ) -> None:
        """Cancelled by `end`. Until the first token the prompt counts against what may be inside at a time."""
        try:
            tokens = len(request.prompt_tokens) + len(request.output_tokens)
            priority = await self.admission.enter(
                tokens, request.priority, patience_seconds, request.tenant, request.weight
            )
            request = replace(request, priority=priority)
            attempt.inside_tokens, attempt.entered, attempt.is_entered = tokens, time.monotonic(), True
            await self._enter(attempt, request)
        except BatonError as error:
            self.end(attempt.transfer_id, common_pb2.ATTEMPT_OUTCOME_ABORTED, error)
        except Exception as error:
            log.exception("attempt failed", extra={"request_id": attempt.request_id})
            failure = engine_request_error(error)
            self.end(attempt.transfer_id, common_pb2.ATTEMPT_OUTCOME_ABORTED, failure)

    async def _enter(self, attempt: DecodeAttempt, request: EngineRequest) -> None:
        attempt.choices = request.n
        self.by_engine_id[attempt.engine_id] = attempt
        attempt.machine.to(DecodeState.DECODING)
        await self._core.host.call(lambda engine: engine.add(request))

    def _leave(self, attempt: DecodeAttempt) -> None:
        if attempt.inside_tokens:
            tokens, attempt.inside_tokens = attempt.inside_tokens, 0
            self.admission.leave(tokens)

    def end(
        self, transfer_id: bytes, outcome: common_pb2.AttemptOutcome.ValueType, error: BatonError | None
    ) -> None:
        attempt = self.attempts.get(transfer_id)
        if attempt is None or attempt.machine.state is DecodeState.ENDED:
            return
        waits_for_its_turn = attempt.machine.state is DecodeState.EXPECTED and attempt.entering is not None
        attempt.machine.to(DecodeState.ENDED)
        if attempt.giving_up is not None:  # the timer would keep the whole log for as long
            attempt.giving_up.cancel()
        attempt.is_finished = outcome == common_pb2.ATTEMPT_OUTCOME_DONE
        self.ended[outcome_name(outcome)] += 1
        if attempt.entering is not None and waits_for_its_turn:
            attempt.entering.cancel()
        self._leave(attempt)
        self.by_engine_id.pop(attempt.engine_id, None)
        attempt.log.end(
            common_pb2.AttemptEnd(
                outcome=outcome,
                error=error.to_wire() if error is not None else None,
                report=attempt.finish_report(),
            )
        )
        if attempt.trace is not None and self._core.tracing is not None:
            attempt_trace.record(self._core.tracing, attempt.trace, attempt, outcome)
        self.attempts.expect_reader(attempt)

    def _forget_unless_reserved(self, attempt: DecodeAttempt, seconds: float) -> None:
        def give_up() -> None:
            if attempt.machine.state is DecodeState.EXPECTED:
                self._core.spawn(self.abort(attempt.transfer_id))

        attempt.giving_up = asyncio.get_running_loop().call_later(seconds, give_up)
