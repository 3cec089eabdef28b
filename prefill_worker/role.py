"""The life of an attempt at the prefill worker: turn, place to land, compute, hand over, release."""

from __future__ import annotations

import asyncio
import logging
import time

from cluster.block_hash import hash_blocks
from cluster.errors import BatonError, BlocksExhaustedError, CancelledError, InternalError
from engine.request import StepOutput
from kv_transfer.base import HandoffSpec
from kv_transfer.sender import HandoffSender, OutgoingHandoff
from prefill_worker.admission import Admission
from prefill_worker.attempt import PrefillAttempt, Prefilled, PrefillState
from wire import common_pb2, prefill_pb2
from worker.attempt_log import AttemptLog
from worker.attempts import Attempts
from worker.convert import request_from_wire, token_to_wire
from worker.core import WorkerCore

log = logging.getLogger(__name__)


class PrefillRole:
    """Policy around one engine: who enters, where the KV goes, what the router hears."""

    def __init__(self, core: WorkerCore, sender: HandoffSender):
        self._core = core
        self._sender = sender
        self._admission = Admission(2 * core.config.engine.max_batch_tokens, core.config.batch_aging_seconds)
        self.attempts: Attempts[PrefillAttempt] = Attempts(
            cancel=self.cancel, max_attempts=core.config.max_queued_requests
        )
        self._by_engine_id: dict[str, PrefillAttempt] = {}

    def open(self, request: prefill_pb2.PrefillRunRequest) -> PrefillAttempt:
        """The attempt of this transfer id: a repeated Run gets the first one's. Raises BatonError."""
        known = self.attempts.get(request.transfer_id)
        if known is not None:
            return known
        self._core.check_epoch(request.worker_epoch)
        self._core.check_accepting()
        attempt = PrefillAttempt(request, AttemptLog(self._core.beat_step))
        self.attempts.open(attempt)
        attempt.task = asyncio.get_running_loop().create_task(self._run(attempt))
        return attempt

    async def cancel(self, attempt: PrefillAttempt) -> None:
        """Ends an attempt at once; returns when its blocks are free."""
        if attempt.task is not None and not attempt.task.done():
            attempt.task.cancel()
            await asyncio.wait([attempt.task], timeout=5.0)

    def on_output(self, output: StepOutput) -> None:
        """Hears of every engine step, on the loop."""
        for token in output.tokens:
            attempt = self._by_engine_id.get(token.request_id)
            if attempt is not None:
                attempt.tokens.append(token)
                attempt.log.add(token_to_wire(token))
        for done in output.done:
            attempt = self._by_engine_id.get(done.request_id)
            if attempt is not None and not attempt.prefilled.done():
                attempt.prefilled.set_result(Prefilled(attempt.tokens, done))

    async def _run(self, attempt: PrefillAttempt) -> None:
        end = common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_ABORTED)
        try:
            await self._prefill(attempt)
            end.outcome = common_pb2.ATTEMPT_OUTCOME_DONE
        except BlocksExhaustedError as error:
            end.outcome = common_pb2.ATTEMPT_OUTCOME_REFUSED
            end.error.CopyFrom(error.to_wire())
        except BatonError as error:
            end.error.CopyFrom(error.to_wire())
        except asyncio.CancelledError:
            end.outcome = common_pb2.ATTEMPT_OUTCOME_CANCELLED
            end.error.CopyFrom(CancelledError("cancelled").to_wire())
        except Exception as error:
            log.exception("attempt failed", extra={"request_id": attempt.request.request_id})
            end.error.CopyFrom(InternalError(f"{type(error).__name__}: {error}").to_wire())
        attempt.report.worker_id = self._core.worker_id
        end.report.CopyFrom(attempt.report)
        attempt.log.end(end)
        self.attempts.expect_reader(attempt)

    async def _prefill(self, attempt: PrefillAttempt) -> None:
        tokens = attempt.token_count
        remaining = attempt.deadline - time.monotonic()
        spec = attempt.request.spec
        await self._admission.enter(tokens, spec.priority, remaining, spec.tenant, spec.weight)
        inside = True
        handoff: OutgoingHandoff | None = None
        try:
            attempt.report.prefill_queue_seconds = time.monotonic() - attempt.received
            attempt.machine.to(PrefillState.ADMITTED)
            handoff = await self._reserve(attempt)
            prefilled = await self._compute(attempt, handoff)
            self._admission.leave(tokens)
            inside = False
            await self._hand_over(attempt, handoff, prefilled)
            attempt.machine.to(PrefillState.RELEASED)
        except BaseException as error:
            attempt.machine.to(PrefillState.DRAINING)
            if handoff is not None:
                await handoff.abort(str(error) or type(error).__name__)
            attempt.machine.to(PrefillState.DRAINED)
            raise
        finally:
            if inside:
                self._admission.leave(tokens)
            self._by_engine_id.pop(attempt.engine_id, None)
            await self._free(attempt)

    async def _reserve(self, attempt: PrefillAttempt) -> OutgoingHandoff:
        request = attempt.request
        packed = request.spec.prompt_tokens + request.spec.output_tokens
        hashes = hash_blocks(
            packed,
            self._core.page_size,
            secret=self._core.config.secret.encode(),
            salt=request.spec.salt,
        )
        spec = HandoffSpec(request.transfer_id, request.request_id, request.spec, attempt.token_count, hashes)
        remaining = max(0.05, attempt.deadline - time.monotonic())
        return await self._sender.reserve(request.decode, spec, remaining)

    async def _compute(self, attempt: PrefillAttempt, handoff: OutgoingHandoff) -> Prefilled:
        attempt.machine.to(PrefillState.COMPUTING)
        started = time.monotonic()
        self._by_engine_id[attempt.engine_id] = attempt
        request = request_from_wire(attempt.engine_id, attempt.request.spec, prefill_only=True)
        handoff.start(attempt.engine_id)
        await self._core.host.call(lambda engine: engine.add(request))
        prefilled = await attempt.prefilled
        report = attempt.report
        report.prefill_seconds = time.monotonic() - started
        report.cached_tokens = prefilled.done.cached_tokens
        report.computed_prompt_tokens = prefilled.done.computed_prompt_tokens
        report.prompt_compute_seconds = prefilled.done.prompt_compute_seconds
        return prefilled

    async def _hand_over(
        self, attempt: PrefillAttempt, handoff: OutgoingHandoff, prefilled: Prefilled
    ) -> None:
        if all(token.finish is not None for token in prefilled.tokens):
            await handoff.abort("finished with its first token")
            return
        attempt.machine.to(PrefillState.SENT)
        first = [token_to_wire(token) for token in prefilled.tokens]
        result = await handoff.finish(first, attempt.report)
        report = attempt.report
        report.handoff_exposed_seconds = result.exposed_seconds
        report.not_shipped_tokens = result.held_tokens
        report.kv_bytes_shipped = result.bytes_shipped
        report.transport = result.transport

    async def _free(self, attempt: PrefillAttempt) -> None:
        """Blocks of a computed prompt become prefix cache; of any other they are free."""
        engine_id = attempt.engine_id
        if attempt.machine.state is PrefillState.RELEASED:
            await self._core.host.call(lambda engine: engine.release(engine_id))
        else:
            await self._core.host.call(lambda engine: engine.abort(engine_id))
