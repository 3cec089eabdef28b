"""The life of an attempt at the decode worker: expected, reserved, decoding, ended."""

from __future__ import annotations

import asyncio

from cluster.errors import BatonError, CancelledError
from decode_worker.attempt import DecodeAttempt, DecodeState
from engine.request import EngineRequest, RequestDone, StepOutput
from kv_transfer.base import HandoffState
from kv_transfer.receiver import HandoffReceiver
from wire import common_pb2, decode_pb2
from worker.attempt_log import MAX_UNREAD_TOKENS, AttemptLog
from worker.attempts import Attempts
from worker.convert import request_from_wire, token_to_wire
from worker.core import WorkerCore


class DecodeRole:
    """Policy around one engine: what routers ask of it, and what they hear."""

    def __init__(self, core: WorkerCore):
        self._core = core
        self.receiver: HandoffReceiver | None = None  # set once, by whoever builds the pair
        self.attempts: Attempts[DecodeAttempt] = Attempts(
            cancel=self.cancel, max_attempts=core.config.max_queued_requests
        )
        self.by_engine_id: dict[str, DecodeAttempt] = {}

    # --- the router's side -----------------------------------------------------------------------------

    def attach(self, request: decode_pb2.AttachRequest) -> DecodeAttempt:
        known = self.attempts.get(request.transfer_id)
        if known is not None:
            return known
        self._core.check_epoch(request.worker_epoch)
        attempt = self.open(request.transfer_id, request.request_id)
        self._forget_unless_reserved(attempt, (request.admission_deadline_ms or 30_000) / 1000)
        return attempt

    async def run(self, request: decode_pb2.DecodeRunRequest) -> DecodeAttempt:
        """Local prefill: the whole request in this engine."""
        known = self.attempts.get(request.transfer_id)
        if known is not None:
            return known
        self._core.check_epoch(request.worker_epoch)
        self._core.check_accepting()
        attempt = self.open(request.transfer_id, request.request_id)
        attempt.local = True
        await self._enter(attempt, request_from_wire(attempt.engine_id, request.spec))
        return attempt

    async def abort(self, transfer_id: bytes) -> HandoffState:
        """The arbiter's answer: COMMITTED stays, everything else is ABORTED now and for good."""
        attempt = self.attempts.get(transfer_id)
        if attempt is not None and attempt.machine.state is DecodeState.DECODING:
            return HandoffState.COMMITTED
        assert self.receiver is not None, "the receiver is set before the server starts"
        state = await self.receiver.abort(transfer_id)
        if state is not HandoffState.COMMITTED:
            self.attempts.remember_ended(transfer_id)
            self.end(transfer_id, common_pb2.ATTEMPT_OUTCOME_ABORTED, None)
        return state

    async def cancel(self, attempt: DecodeAttempt) -> None:
        """Ends an attempt at once, committed or not; returns when its blocks are free."""
        state = await self.abort(attempt.transfer_id)
        if state is HandoffState.COMMITTED:
            engine_id = attempt.engine_id
            await self._core.host.call(lambda engine: engine.abort(engine_id))
            error = CancelledError("cancelled")
            self.end(attempt.transfer_id, common_pb2.ATTEMPT_OUTCOME_CANCELLED, error)

    # --- the engine's side -----------------------------------------------------------------------------

    def on_output(self, output: StepOutput) -> None:
        """Hears of every engine step, on the loop."""
        for token in output.tokens:
            attempt = self.by_engine_id.get(token.request_id)
            if attempt is not None:
                attempt.token_came()
                attempt.log.add(token_to_wire(token))
                self._pause_if_unread(attempt)
        for done in output.done:
            self._done(done)
        for engine_id in output.evicted_reservations:
            self._core.spawn(self._evicted(bytes.fromhex(engine_id)))

    def _done(self, done: RequestDone) -> None:
        attempt = self.by_engine_id.get(done.request_id)
        if attempt is None:
            return
        if attempt.local:
            attempt.report.cached_tokens = done.cached_tokens
            attempt.report.computed_prompt_tokens = done.computed_prompt_tokens
            attempt.report.prompt_compute_seconds = done.prompt_compute_seconds
        outcome = common_pb2.ATTEMPT_OUTCOME_PREEMPTED if done.preempted else common_pb2.ATTEMPT_OUTCOME_DONE
        self.end(attempt.transfer_id, outcome, None)

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

    async def _enter(self, attempt: DecodeAttempt, request: EngineRequest) -> None:
        attempt.choices = request.n
        self.by_engine_id[attempt.engine_id] = attempt
        attempt.machine.to(DecodeState.DECODING)
        try:
            await self._core.host.call(lambda engine: engine.add(request))
        except BatonError as error:
            self.end(attempt.transfer_id, common_pb2.ATTEMPT_OUTCOME_ABORTED, error)

    def end(
        self, transfer_id: bytes, outcome: common_pb2.AttemptOutcome.ValueType, error: BatonError | None
    ) -> None:
        attempt = self.attempts.get(transfer_id)
        if attempt is None or attempt.machine.state is DecodeState.ENDED:
            return
        attempt.machine.to(DecodeState.ENDED)
        self.by_engine_id.pop(attempt.engine_id, None)
        attempt.log.end(
            common_pb2.AttemptEnd(
                outcome=outcome,
                error=error.to_wire() if error is not None else None,
                report=attempt.finish_report(),
            )
        )
        self.attempts.expect_reader(attempt)

    def _forget_unless_reserved(self, attempt: DecodeAttempt, seconds: float) -> None:
        def give_up() -> None:
            if attempt.machine.state is DecodeState.EXPECTED:
                self._core.spawn(self.abort(attempt.transfer_id))

        asyncio.get_running_loop().call_later(seconds, give_up)
