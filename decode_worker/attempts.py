"""The attempts of a decode worker: those that routers have opened, and what its engine reports of them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from cluster.errors import BatonError, EngineFailedError, engine_request_error
from cluster.faults.points import Point
from decode_worker import attempt_trace
from decode_worker.attempt import DecodeAttempt, DecodeState
from engine.engine import Engine
from engine.request import RequestDone, StepOutput, TokenOutput
from wire import common_pb2, decode_pb2, handoff_pb2
from worker.admission import Admissions
from worker.attempts import Attempts
from worker.convert import add_to_log, outcome_counts, outcome_name
from worker.prompt_scores_room import PromptScoresRoom
from worker.request_counts import RequestCounts
from worker.role import RoleParts

log = logging.getLogger(__name__)


class DecodeAttempts(Attempts[DecodeAttempt]):
    """Live attempts by transfer id, and by engine id those that the engine has."""

    def __init__(
        self,
        parts: RoleParts,
        *,
        cancel: Callable[[DecodeAttempt], Awaitable[None]],
        cancel_by_router: Callable[[bytes], Awaitable[object]],
        evicted: Callable[[bytes], Coroutine[Any, Any, object]],
    ):
        """`cancel` ends an attempt without a reader. `evicted`: the engine has taken a reservation's blocks back for
        running requests."""
        super().__init__(
            cancel=cancel,
            cancel_by_router=cancel_by_router,
            credited=self.resume,
            max_attempts=parts.config.max_queued_requests,
        )
        self._parts = parts
        self._evicted = evicted
        self.by_engine_id: dict[str, DecodeAttempt] = {}
        self.ended = outcome_counts()
        self.admission = Admissions(
            2 * parts.config.engine.max_batch_tokens,
            parts.config.batch_aging_seconds,
            engine_full=parts.host.full,
        )
        self.prompt_room = PromptScoresRoom(parts.config.batch_aging_seconds)
        self.counts = RequestCounts()  # of requests that are prefilled here
        self._at_tokens = parts.faults.point(Point.DECODE_TOKENS)
        self._at_done = parts.faults.point(Point.DECODE_DONE)

    def open_new(self, request: handoff_pb2.Reserve | decode_pb2.DecodeRunRequest) -> DecodeAttempt:
        """Raises StaleTransferError, InvalidRequestError or OverloadedError."""
        transfer_id, request_id = request.transfer_id, request.request_id
        attempt = self.open(
            transfer_id, request.handle, request.spec, lambda log: DecodeAttempt(transfer_id, request_id, log)
        )
        attempt.report.worker_id = self._parts.identity.worker_id
        return attempt

    def enter(self, attempt: DecodeAttempt) -> None:
        """Take the engine's results for it from now on."""
        self.by_engine_id[attempt.engine_id] = attempt

    def end(
        self, transfer_id: bytes, outcome: common_pb2.AttemptOutcome.ValueType, error: BatonError | None
    ) -> None:
        attempt = self.get(transfer_id)
        if attempt is None or attempt.machine.state is DecodeState.ENDED:
            return
        waits_for_its_turn = attempt.machine.state is DecodeState.EXPECTED and attempt.entering is not None
        if error is None and outcome == common_pb2.ATTEMPT_OUTCOME_ABORTED:
            error = attempt.abort_reason
        attempt.machine.to(DecodeState.ENDED)
        attempt.is_finished = outcome == common_pb2.ATTEMPT_OUTCOME_DONE
        self.ended[outcome_name(outcome)] += 1
        if attempt.entering is not None and waits_for_its_turn:
            attempt.entering.cancel()
        attempt.stop_compiling()
        self._leave(attempt)
        self.by_engine_id.pop(attempt.engine_id, None)
        attempt.log.end(
            common_pb2.AttemptEnd(
                outcome=outcome,
                error=error.to_wire() if error is not None else None,
                report=attempt.finish_report(),
            )
        )
        if attempt.trace is not None and self._parts.tracing is not None:
            attempt_trace.record(self._parts.tracing, attempt.trace, attempt, outcome)

    def failed(self, error: BatonError) -> None:
        """End attempts without calling the engine, which has failed: with an EngineFailedError only those of its step."""
        for attempt in self.all():
            name = attempt.engine_id
            in_step = name in self.by_engine_id and self._parts.host.in_failed_step(name)
            if in_step or not isinstance(error, EngineFailedError):
                self.end(attempt.transfer_id, common_pb2.ATTEMPT_OUTCOME_ABORTED, error)

    # --- results of the engine ---------------------------------------------------------------------------

    def on_output(self, output: StepOutput) -> None:
        """Take the results of an engine step, on the loop."""
        for prompt in output.prompts:
            if (attempt := self.by_engine_id.get(prompt.request_id)) is not None:
                try:
                    attempt.log.add_prompt_output(prompt)
                except Exception as error:
                    self._attempt_failed(attempt, error)
        if output.tokens:
            self._at_tokens(output.tokens[0].request_id)
        for token in output.tokens:
            attempt = self.by_engine_id.get(token.request_id)
            if attempt is None:
                continue
            try:
                self._token(attempt, token, output.began)
            except Exception as error:
                self._attempt_failed(attempt, error)
        for done in output.done:
            attempt = self.by_engine_id.get(done.request_id)
            if attempt is None:
                continue
            try:
                self._done(attempt, done)
            except Exception as error:
                self._attempt_failed(attempt, error)
        for engine_id in output.evicted_reservations:
            self._parts.background_tasks.spawn(self._evicted(bytes.fromhex(engine_id)))
        self.admission.look()

    def _token(self, attempt: DecodeAttempt, token: TokenOutput, step_began: float) -> None:
        if attempt.first_token is None:
            attempt.record_first_token(step_began)
            if attempt.local_prefill:
                self.counts.first_token(attempt.first_token_seconds)
            self._leave(attempt)
        add_to_log(attempt.log, token, whole=attempt.whole_tokens)
        if not attempt.paused and attempt.log.full:
            attempt.paused = True
            self._call(lambda engine: engine.pause(attempt.engine_id))

    def _attempt_failed(self, attempt: DecodeAttempt, error: Exception) -> None:
        """End one attempt after an exception in its own work; the rest of the output belongs to other attempts."""
        log.error(
            "attempt %s of request %s failed",
            attempt.transfer_id.hex(),
            attempt.request_id,
            extra={"request_id": attempt.request_id},
            exc_info=error,
        )
        self._call(lambda engine: engine.abort(attempt.engine_id))
        self.end(attempt.transfer_id, common_pb2.ATTEMPT_OUTCOME_ABORTED, engine_request_error(error))

    def _done(self, attempt: DecodeAttempt, done: RequestDone) -> None:
        self._at_done(done.request_id)
        attempt.left_engine(done)
        outcome = common_pb2.ATTEMPT_OUTCOME_PREEMPTED if done.preempted else common_pb2.ATTEMPT_OUTCOME_DONE
        if done.error is not None:
            outcome = common_pb2.ATTEMPT_OUTCOME_ABORTED
        self.end(attempt.transfer_id, outcome, done.error)

    def _leave(self, attempt: DecodeAttempt) -> None:
        """With its first token or its end, a local prefill leaves the admission's bound."""
        if attempt.inside_tokens:
            tokens, attempt.inside_tokens = attempt.inside_tokens, 0
            self.admission.leave(tokens, attempt.tenant, compiles=attempt.compiles)

    def resume(self, attempt: DecodeAttempt) -> None:
        """Resume a request whose router has room for more of every choice."""
        if attempt.paused and not attempt.log.full:
            attempt.paused = False
            self._call(lambda engine: engine.resume(attempt.engine_id))

    def _call(self, function: Callable[[Engine], object]) -> None:
        self._parts.background_tasks.spawn(self._parts.host.call(function))
