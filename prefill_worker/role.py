"""The life of an attempt at the prefill worker: turn, place to land, compute, hand over, release."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from cluster.background_tasks import FollowUps
from cluster.errors import (
    BatonError,
    BlocksExhaustedError,
    CancelledError,
    DrainingError,
    EngineFailedError,
    EngineRequestError,
    InternalError,
    engine_request_error,
)
from cluster.faults.points import Point
from cluster.protocol.first_token import ends_with_first_token
from engine.request import EngineRequest, StepOutput
from kv_transfer.prefill_side.handoff import OutgoingHandoff
from kv_transfer.prefill_side.part_times import PartTimes
from kv_transfer.prefill_side.sender import HandoffSender
from prefill_worker import attempt_trace
from prefill_worker.attempt import PrefillAttempt, Prefilled, PrefillState
from wire import common_pb2, handoff_pb2, prefill_pb2
from worker.admission import Admission
from worker.arrivals import Arrivals
from worker.attempt_log import AttemptLog
from worker.attempts import Attempts
from worker.convert import outcome_counts, outcome_name, request_from_wire, token_to_wire
from worker.core import WorkerCore
from worker.validate import check_spec

log = logging.getLogger(__name__)
FREE_SECONDS = 1.0  # how long the answer to a cancel waits for writes that still read the request's blocks


class PrefillRole:
    """Policy around one engine: who enters, where the KV goes, what the router hears."""

    def __init__(self, core: WorkerCore, sender: HandoffSender):
        self._core = core
        self._sender = sender
        self.admission = Admission(2 * core.config.engine.max_batch_tokens, core.config.batch_aging_seconds)
        self.attempts: Attempts[PrefillAttempt] = Attempts(
            cancel=self.cancel, max_attempts=core.config.max_queued_requests
        )
        self._by_engine_id: dict[str, PrefillAttempt] = {}
        self._freeing = FollowUps()  # free the blocks of ended attempts once no write reads them
        self.arrivals = Arrivals()
        self._at_admitted = core.faults.point(Point.PREFILL_ADMITTED)
        self._at_reserved = core.faults.point(Point.PREFILL_RESERVED)
        self._at_computed = core.faults.point(Point.PREFILL_COMPUTED)
        self._at_finished = core.faults.point(Point.PREFILL_FINISHED)
        self.ended = outcome_counts()  # attempts
        self._has_failed = False

    @property
    def worker_id(self) -> str:
        return self._core.worker_id

    def open(self, request: prefill_pb2.PrefillRunRequest) -> PrefillAttempt:
        """The attempt of this transfer id: a repeated Run gets the first one's. Raises BatonError."""
        known = self.attempts.get(request.transfer_id)
        if known is not None:
            return known
        self._core.check_epoch(request.worker_epoch)
        self._core.check_accepting()
        check_spec(request.spec, self._core.spec_limits)
        attempt = PrefillAttempt(request, AttemptLog(self._core.beat_step))
        self.attempts.open(attempt)
        self.arrivals.came(attempt.token_count)
        attempt.trace = self._core.trace_of(request.spec)
        attempt.task = asyncio.get_running_loop().create_task(self._run(attempt))
        return attempt

    async def cancel(self, attempt: PrefillAttempt) -> None:
        """End an attempt at once. Its blocks are freed once no write reads them (`freed`)."""
        if attempt.task is not None and not attempt.task.done():
            attempt.task.cancel()
            await asyncio.wait([attempt.task], timeout=5.0)
            if attempt.task.cancelled():  # before its first step, so that it has sent no end
                end = common_pb2.AttemptEnd()
                self._was_cancelled(attempt, end)
                self._tell_end(attempt, end)

    async def freed(self, attempt: PrefillAttempt, seconds: float | None = None) -> bool:
        """Wait until an ended attempt holds no block. Returns False after `seconds` (default FREE_SECONDS): a write over
        TCP to a stopped decode worker may stay pending for ever."""
        try:
            async with asyncio.timeout(FREE_SECONDS if seconds is None else seconds):
                await attempt.freed.wait()
        except TimeoutError:
            return False
        return True

    def idle(self) -> bool:
        return len(self.attempts) == 0

    async def give_back_waiting(self) -> None:
        """Nothing of these has been computed, and no place to land is held for them."""
        queued = PrefillState.QUEUED
        await self._give_back([one for one in self.attempts.all() if one.machine.state is queued])

    async def give_back_running(self) -> None:
        await self._give_back(self.attempts.all())

    async def _give_back(self, attempts: list[PrefillAttempt]) -> None:
        """Cancel all at once: one by one, each cancelled attempt would let a queued one start."""
        for attempt in attempts:
            attempt.given_back = True
        await asyncio.gather(*(self.cancel(attempt) for attempt in attempts))

    def failed(self, word: BatonError) -> None:
        """The engine has failed: end what it held with the error `word`, and return waiting attempts to the router. An
        EngineFailedError is for the attempts of the failed step only."""
        self._has_failed = True
        for attempt in self.attempts.all():
            prefilled, name = attempt.prefilled, attempt.engine_id
            of_step = isinstance(word, EngineFailedError)
            held = name in self._by_engine_id and (not of_step or self._core.host.in_failed_step(name))
            if held and not prefilled.done():
                prefilled.set_exception(word)
                prefilled.exception()  # marks it retrieved: the attempt may end without reading it
            elif of_step or prefilled.cancelled() or (prefilled.done() and prefilled.exception()):
                continue
            elif attempt.task is not None:
                attempt.given_back = True
                attempt.task.cancel()

    def on_output(self, output: StepOutput) -> None:
        """Hears of every engine step, on the loop."""
        for token in output.tokens:
            attempt = self._by_engine_id.get(token.request_id)
            if attempt is None or attempt.prefilled.done():
                continue
            try:
                attempt.log.add(token_to_wire(token))
                attempt.tokens.append(token)
            except Exception as error:
                attempt.prefilled.set_exception(engine_request_error(error))
        for done in output.done:
            attempt = self._by_engine_id.get(done.request_id)
            if attempt is None or attempt.prefilled.done():
                continue
            if done.error is not None:
                attempt.prefilled.set_exception(done.error)
            else:
                attempt.prefilled.set_result(Prefilled(attempt.tokens, done))

    async def _run(self, attempt: PrefillAttempt) -> None:
        end = common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_ABORTED)
        try:
            await self._prefill(attempt)
            end.outcome = common_pb2.ATTEMPT_OUTCOME_DONE
        except (BlocksExhaustedError, DrainingError) as error:  # the decode worker has no room, or leaves
            if not self._has_failed:
                end.outcome = common_pb2.ATTEMPT_OUTCOME_REFUSED
            end.error.CopyFrom(error.to_wire())
        except BatonError as error:
            end.error.CopyFrom(error.to_wire())
        except asyncio.CancelledError:
            self._was_cancelled(attempt, end)
        except Exception as error:
            log.exception("attempt failed", extra={"request_id": attempt.request.request_id})
            end.error.CopyFrom(InternalError(f"{type(error).__name__}: {error}").to_wire())
        self._tell_end(attempt, end)

    def _was_cancelled(self, attempt: PrefillAttempt, end: common_pb2.AttemptEnd) -> None:
        if attempt.given_back:
            end.outcome = common_pb2.ATTEMPT_OUTCOME_ABORTED
            end.error.CopyFrom(DrainingError(f"{self._core.worker_id} is leaving").to_wire())
        else:
            end.outcome = common_pb2.ATTEMPT_OUTCOME_CANCELLED
            end.error.CopyFrom(CancelledError("cancelled").to_wire())

    def _tell_end(self, attempt: PrefillAttempt, end: common_pb2.AttemptEnd) -> None:
        self.ended[outcome_name(end.outcome)] += 1
        attempt.report.worker_id = self._core.worker_id
        end.report.CopyFrom(attempt.report)
        attempt.log.end(end)
        if attempt.trace is not None and self._core.tracing is not None:
            attempt_trace.record(self._core.tracing, attempt.trace, attempt, end)
        self.attempts.expect_reader(attempt)

    async def _prefill(self, attempt: PrefillAttempt) -> None:
        tokens = attempt.token_count
        remaining = attempt.deadline - time.monotonic()
        spec = attempt.request.spec
        priority = await self.admission.enter(tokens, spec.priority, remaining, spec.tenant, spec.weight)
        inside = True
        attempt.freed.clear()
        handoff: OutgoingHandoff | None = None
        try:
            attempt.report.prefill_queue_seconds = time.monotonic() - attempt.received
            attempt.machine.to(PrefillState.ADMITTED)
            self._at_admitted(attempt.transfer_id)
            if not ends_with_first_token(spec):
                handoff = await self._reserve(attempt)
                self._at_reserved(attempt.transfer_id)
            attempt.report.prefill_queue_seconds = time.monotonic() - attempt.received
            prefilled = await self._compute(attempt, handoff, priority)
            self.admission.leave(tokens)
            inside = False
            if handoff is not None:
                await self._hand_over(attempt, handoff, prefilled)
            attempt.machine.to(PrefillState.RELEASED)
        except BaseException as error:
            attempt.machine.to(PrefillState.DRAINING)
            if handoff is not None:
                wrong = isinstance(error, EngineRequestError)
                await handoff.abort(str(error) or type(error).__name__, discard=wrong)
            attempt.machine.to(PrefillState.DRAINED)
            raise
        finally:
            if inside:
                self.admission.leave(tokens)
            self._by_engine_id.pop(attempt.engine_id, None)
            # In the background, so that the router gets the end now: a write to a stopped decode worker may never end.
            self._freeing.spawn(self._free(attempt, handoff))

    async def _reserve(self, attempt: PrefillAttempt) -> OutgoingHandoff:
        request = attempt.request
        reserve = handoff_pb2.Reserve(
            transfer_id=request.transfer_id,
            request_id=request.request_id,
            spec=request.spec,
            token_count=attempt.token_count,
        )
        remaining = max(0.05, attempt.deadline - time.monotonic())
        return await self._sender.reserve(request.decode, reserve, remaining)

    async def _compute(
        self, attempt: PrefillAttempt, handoff: OutgoingHandoff | None, priority: int
    ) -> Prefilled:
        attempt.machine.to(PrefillState.COMPUTING)
        started = time.monotonic()
        self._by_engine_id[attempt.engine_id] = attempt
        request = request_from_wire(attempt.engine_id, attempt.request.spec, prefill_only=True)
        request = replace(request, priority=priority, export=handoff is not None)
        if handoff is not None:
            if attempt.trace is not None:
                attempt.parts = PartTimes()
            await handoff.start(attempt.engine_id, attempt.parts)
        await self._add(request)
        prefilled = await attempt.prefilled
        self.arrivals.first_token(time.monotonic() - attempt.received)
        report = attempt.report
        chunks = attempt.chunks = prefilled.done.chunks
        # Until its first step it waited: for its turn, for a place to land, and for the step before.
        began = max(started, chunks[0].began) if chunks else started
        report.prefill_queue_seconds = began - attempt.received
        report.prefill_seconds = time.monotonic() - began
        report.cached_tokens = prefilled.done.cached_tokens
        report.computed_prompt_tokens = prefilled.done.computed_prompt_tokens
        report.prompt_compute_seconds = prefilled.done.prompt_compute_seconds
        return prefilled

    async def _add(self, request: EngineRequest) -> None:
        try:
            await self._core.host.call(lambda engine: engine.add(request))
        except BatonError:
            raise
        except Exception as error:
            log.exception(
                "request %s was refused by the engine",
                request.request_id,
                extra={"request_id": request.request_id},
            )
            raise engine_request_error(error) from error

    async def _hand_over(
        self, attempt: PrefillAttempt, handoff: OutgoingHandoff, prefilled: Prefilled
    ) -> None:
        if all(token.finish is not None for token in prefilled.tokens):
            await handoff.abort("finished with its first token")
            return
        attempt.machine.to(PrefillState.SENT)
        self._at_computed(attempt.transfer_id)
        first = [token_to_wire(token) for token in prefilled.tokens]
        result = await handoff.finish(first, attempt.report)
        self._at_finished(attempt.transfer_id)
        report = attempt.report
        report.handoff_exposed_seconds = result.exposed_seconds
        report.not_shipped_tokens = result.held_tokens
        report.kv_bytes_shipped = result.bytes_shipped
        report.transport = result.transport

    async def _free(self, attempt: PrefillAttempt, handoff: OutgoingHandoff | None) -> None:
        """Release the attempt's blocks once every rank reports that it reads them no more.

        A part read after that would ship another request's KV under this request's hashes.
        """
        engine_id = attempt.engine_id
        try:
            if handoff is not None:
                await self._core.host.call(lambda engine: engine.park(engine_id))
                await handoff.drained()
            await self._core.host.call(lambda engine: engine.abort(engine_id))
        except (DrainingError, InternalError) as error:  # the engine has stopped, and its blocks with it
            log.debug("blocks were not released, the engine has stopped: %s", error)
        attempt.freed.set()
