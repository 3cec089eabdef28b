"""Takes an attempt through the prefill worker: turn, reservation, prompt, hand-off, release of its blocks."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from cluster.background_tasks import BackgroundTasks
from cluster.errors import BatonError, DrainingError, EngineRequestError, InternalError, engine_request_error
from cluster.faults.points import Point
from cluster.grammar.spec import GrammarSpec, grammar_from_wire
from cluster.protocol.first_token import ends_with_first_token
from cluster.protocol.prompt_scores import leave_out_prompt_logprobs
from engine.compiled_grammar import CompiledGrammar
from engine.request import EngineRequest, StepOutput
from kv_transfer.prefill_side.handoff import OutgoingHandoff, PartTimes
from kv_transfer.prefill_side.sender import HandoffSender
from prefill_worker.attempt import PrefillAttempt, Prefilled, PrefillState
from wire import handoff_pb2
from worker.admission import Admissions
from worker.convert import add_to_log, request_from_wire, token_to_wire
from worker.engine_host import must_compile
from worker.prompt_scores_room import PromptScoresRoom
from worker.request_counts import RequestCounts
from worker.role import RoleParts

log = logging.getLogger(__name__)


class Prefilling:
    def __init__(self, parts: RoleParts, sender: HandoffSender):
        self._parts = parts
        self._sender = sender
        self.admission = Admissions(
            2 * parts.config.engine.max_batch_tokens, parts.config.batch_aging_seconds
        )
        self.prompt_room = PromptScoresRoom(parts.config.batch_aging_seconds)
        self.counts = RequestCounts()
        self.by_engine_id: dict[str, PrefillAttempt] = {}  # attempts that the engine has
        self._freeing = BackgroundTasks()  # free the blocks of ended attempts once no write reads them
        self._at_admitted = parts.faults.point(Point.PREFILL_ADMITTED)
        self._at_reserved = parts.faults.point(Point.PREFILL_RESERVED)
        self._at_computed = parts.faults.point(Point.PREFILL_COMPUTED)
        self._at_finished = parts.faults.point(Point.PREFILL_FINISHED)

    async def run(self, attempt: PrefillAttempt) -> None:
        """Return when the decode worker has committed, or the attempt was done with its first token. Raises BatonError."""
        if adapter := attempt.request.spec.adapter:
            await self._parts.host.call(lambda engine: engine.adapters.check(adapter))
        tokens = attempt.token_count
        remaining = attempt.deadline - time.monotonic()
        spec = attempt.request.spec
        await self.prompt_room.enter(spec, attempt.log, remaining)
        remaining = attempt.deadline - time.monotonic()
        grammar = grammar_from_wire(spec.grammar) if spec.HasField("grammar") else None
        priority, compiles = await self.admission.enter(
            tokens,
            spec.priority,
            remaining,
            spec.tenant,
            spec.weight,
            compiles=lambda: must_compile(self._parts.host, grammar, spec.tenant),
        )
        inside = True
        attempt.freed.clear()
        handoff: OutgoingHandoff | None = None
        try:
            attempt.report.prefill_queue_seconds = time.monotonic() - attempt.received
            attempt.machine.to(PrefillState.ADMITTED)
            self._at_admitted(attempt.transfer_id)
            # Before the reservation, which would hold blocks meanwhile.
            compiled = await self._compiled(attempt, grammar)
            if not ends_with_first_token(spec):
                handoff = await self._reserve(attempt)
                self._at_reserved(attempt.transfer_id)
            attempt.report.prefill_queue_seconds = time.monotonic() - attempt.received
            prefilled = await self._compute(attempt, handoff, priority, compiled)
            inside = False
            self.admission.leave(tokens, spec.tenant, compiles=compiles)
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
                self.admission.leave(tokens, spec.tenant, compiles=compiles)
            self.by_engine_id.pop(attempt.engine_id, None)
            # In the background, so that the router gets the end now: a write to a stopped decode worker may never end.
            self._freeing.spawn(self._free(attempt, handoff))

    def on_output(self, output: StepOutput) -> None:
        """Take the results of an engine step, on the loop."""
        for prompt in output.prompts:
            if (attempt := self._unfinished(prompt.request_id)) is None:
                continue
            try:
                attempt.log.add_prompt_output(prompt)
            except Exception as error:
                attempt.prefilled.set_exception(engine_request_error(error))
        for token in output.tokens:
            if (attempt := self._unfinished(token.request_id)) is None:
                continue
            try:
                add_to_log(attempt.log, token, whole=attempt.request.spec.sampling.logprobs)
                attempt.tokens.append(token)
            except Exception as error:
                attempt.prefilled.set_exception(engine_request_error(error))
        for done in output.done:
            if (attempt := self._unfinished(done.request_id)) is None:
                continue
            if done.error is not None:
                attempt.prefilled.set_exception(done.error)
            else:
                attempt.prefilled.set_result(Prefilled(attempt.tokens, done))

    def _unfinished(self, engine_id: str) -> PrefillAttempt | None:
        """The attempt that waits for results of this engine request."""
        attempt = self.by_engine_id.get(engine_id)
        return None if attempt is None or attempt.prefilled.done() else attempt

    async def _compiled(self, attempt: PrefillAttempt, grammar: GrammarSpec | None) -> CompiledGrammar | None:
        if grammar is None:
            return None
        tenant, left = attempt.request.spec.tenant, attempt.deadline - time.monotonic()
        return await self._parts.host.compile_grammar(grammar, tenant, left)

    async def _reserve(self, attempt: PrefillAttempt) -> OutgoingHandoff:
        request = attempt.request
        reserve = handoff_pb2.Reserve(
            transfer_id=request.transfer_id,
            request_id=request.request_id,
            spec=request.spec,
            token_count=attempt.token_count,
            handle=request.decode_handle,
        )
        leave_out_prompt_logprobs(reserve.spec)
        remaining = max(0.05, attempt.deadline - time.monotonic())
        return await self._sender.reserve(request.decode, reserve, remaining)

    async def _compute(
        self,
        attempt: PrefillAttempt,
        handoff: OutgoingHandoff | None,
        priority: int,
        compiled: CompiledGrammar | None,
    ) -> Prefilled:
        attempt.machine.to(PrefillState.COMPUTING)
        started = time.monotonic()
        self.by_engine_id[attempt.engine_id] = attempt
        request = request_from_wire(attempt.engine_id, attempt.request.spec, prefill_only=True)
        request = replace(request, priority=priority, export=handoff is not None, compiled=compiled)
        if handoff is not None:
            if attempt.trace is not None:
                attempt.parts = PartTimes()
            await handoff.start(attempt.engine_id, attempt.parts)
        await self._add(attempt, request)
        prefilled = await attempt.prefilled
        self.counts.first_token(time.monotonic() - attempt.received)
        report = attempt.report
        chunks = attempt.chunks = prefilled.done.chunks
        # The queue ends with its first step: before, it waited for its turn, for a reservation, for the step in progress.
        began = max(started, chunks[0].began) if chunks else started
        report.prefill_queue_seconds = began - attempt.received
        report.prefill_seconds = time.monotonic() - began
        report.cached_tokens = prefilled.done.cached_tokens
        report.computed_prompt_tokens = prefilled.done.computed_prompt_tokens
        report.prompt_compute_seconds = prefilled.done.prompt_compute_seconds
        return prefilled

    async def _add(self, attempt: PrefillAttempt, request: EngineRequest) -> None:
        try:
            await self._parts.host.call(lambda engine: engine.add(request))
        except BatonError:
            raise
        except Exception as error:
            request_id = attempt.request.request_id
            log.exception("the engine refused request %s", request_id, extra={"request_id": request_id})
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
                await self._parts.host.call(lambda engine: engine.park(engine_id))
                await handoff.drained()
            await self._parts.host.call(lambda engine: engine.abort(engine_id))
        except (DrainingError, InternalError) as error:  # the engine has stopped, and its blocks with it
            log.debug(
                "blocks of request %s were not released, the engine has stopped: %s",
                attempt.request.request_id,
                error,
            )
        attempt.freed.set()
