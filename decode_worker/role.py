"""The decode role: runs requests that prefill workers hand over, and those that it prefills itself (local prefill)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace

from prometheus_client.registry import Collector

from cluster.errors import (
    BatonError,
    BlocksExhaustedError,
    CancelledError,
    DrainingError,
    StaleEpochError,
    engine_request_error,
)
from cluster.membership.status import WorkerStatus
from decode_worker import metrics
from decode_worker.attempt import DecodeAttempt, DecodeState
from decode_worker.attempts import DecodeAttempts
from decode_worker.engine_adapter import HandoffEngineAdapter
from decode_worker.quarantine_watch import open_quarantine_watch
from engine.request import EngineRequest, StepOutput
from kv_transfer.contract import DecodeEngine, HandoffState
from kv_transfer.decode_side.receiver import HandoffReceiver
from wire import common_pb2, decode_pb2
from worker.convert import request_from_wire
from worker.engine_host import must_compile, with_grammar
from worker.link.routers import Routers
from worker.role import RoleParts
from worker.validate import admission_seconds, check_spec

log = logging.getLogger(__name__)
EVICTED_SECONDS = 0.05  # before a request whose reservation was taken back is tried again
MakeReceiver = Callable[[RoleParts, DecodeEngine, Callable[[bytes], bool]], HandoffReceiver]


def open_receiver(
    parts: RoleParts, engine: DecodeEngine, is_ended: Callable[[bytes], bool]
) -> HandoffReceiver:
    def exhausted(reason: str) -> None:
        """The end of this process is the fence that its landing ring needs."""
        worker_id = parts.identity.worker_id
        log.error("%s accepts no new hand-offs, drains and ends: %s", worker_id, reason)
        parts.drain_and_fail(reason)

    return HandoffReceiver(
        worker=parts.identity.ref,
        layout=parts.identity.layout,
        ranks=parts.ranks.endpoints,
        addresses=parts.ranks.addresses,
        engine=engine,
        config=parts.config.transfer,
        is_ended=is_ended,
        on_exhausted=exhausted,
        faults=parts.faults,
    )


class DecodeRole:
    """Implements worker.role.Role.

    The receiver calls the engine adapter, the adapter the attempts; only the role calls the receiver.
    """

    def __init__(self, parts: RoleParts, make_receiver: MakeReceiver = open_receiver):
        """Raises SetupError."""
        self._parts = parts
        self.attempts = DecodeAttempts(
            parts, cancel=self.cancel, cancel_by_router=self.cancel_by_router, evicted=self._evicted
        )
        adapter = HandoffEngineAdapter(parts, self.attempts)
        self.receiver = make_receiver(parts, adapter, self.attempts.is_ended)
        self._quarantines = open_quarantine_watch(parts.config, self.receiver)
        self._watching: asyncio.Task[None] | None = None

    # --- calls of routers --------------------------------------------------------------------------------

    def run(self, request: decode_pb2.DecodeRunRequest) -> DecodeAttempt:
        """Local prefill: the whole request in this engine, once it is its turn. Raises BatonError."""
        known = self.attempts.get(request.transfer_id)
        if known is not None:
            return known
        self._parts.identity.check_epoch(request.worker_epoch)
        self._parts.health.check_accepting()
        check_spec(request.spec, self._parts.identity.spec_limits)
        engine_request = request_from_wire(request.transfer_id.hex(), request.spec)
        attempt = self.attempts.open_new(request)
        attempt.local_prefill, attempt.whole_tokens = True, request.spec.sampling.logprobs
        self.attempts.counts.arrived(_tokens(engine_request))
        attempt.trace = self._parts.trace_of(request.spec)
        entering = self._enter_in_turn(attempt, request.spec, engine_request, admission_seconds(request))
        attempt.entering = asyncio.get_running_loop().create_task(entering)
        return attempt

    async def _enter_in_turn(
        self,
        attempt: DecodeAttempt,
        spec: common_pb2.GenerateSpec,
        request: EngineRequest,
        deadline_seconds: float,
    ) -> None:
        """Cancelled when the attempt ends. Until its first token the prompt counts against the admission's bound."""
        try:
            tokens, began = _tokens(request), time.monotonic()
            await self.attempts.prompt_room.enter(spec, attempt.log, deadline_seconds)
            priority, attempt.compiles = await self.attempts.admission.enter(
                tokens,
                request.priority,
                deadline_seconds - (time.monotonic() - began),
                request.tenant,
                request.weight,
                compiles=lambda: must_compile(self._parts.host, request.grammar, request.tenant),
            )
            attempt.inside_tokens, attempt.tenant = tokens, request.tenant  # given back when the attempt ends
            left = deadline_seconds - (time.monotonic() - began)
            request = await with_grammar(self._parts.host, request, left)
            # A long wait has raised its class for its turn, in the engine too, not for all that it computes.
            request = replace(request, waits_as=priority)
            attempt.choices, attempt.entered, attempt.is_entered = request.n, time.monotonic(), True
            self.attempts.enter(attempt)
            attempt.machine.to(DecodeState.DECODING)
            await self._parts.host.call(lambda engine: engine.add(request))
        except BatonError as error:
            self._abort(attempt, error)
        except Exception as error:
            log.exception("request %s failed", attempt.request_id, extra={"request_id": attempt.request_id})
            self._abort(attempt, engine_request_error(error))

    def _abort(self, attempt: DecodeAttempt, error: BatonError) -> None:
        self.attempts.end(attempt.transfer_id, common_pb2.ATTEMPT_OUTCOME_ABORTED, error)

    def check_abort(self, request: decode_pb2.AbortRequest) -> None:
        """Raise StaleEpochError if the attempt belongs to an earlier epoch of this worker.

        Everything of that epoch has ended, so no commit remains that the router could read. The transfer id is
        remembered as ended, so that a late Reserve or Run does not start it.
        """
        try:
            self._parts.identity.check_epoch(request.worker_epoch)
        except StaleEpochError:
            self.attempts.remember_ended(request.transfer_id)
            raise

    async def abort(self, transfer_id: bytes, reason: BatonError | None = None) -> HandoffState:
        """Abort the attempt for good unless it has committed (also if it has finished since); return its state."""
        attempt = self.attempts.get(transfer_id)
        if attempt is not None and attempt.committed:
            return HandoffState.COMMITTED
        if attempt is not None:
            attempt.stop_compiling()  # a commit may wait for it, and the receiver for that
            attempt.abort_reason = reason or attempt.abort_reason  # the end of its hand-off ends it
        state = await self.receiver.abort(transfer_id, reason)
        if state is not HandoffState.COMMITTED:
            self.attempts.remember_ended(transfer_id)
            self.attempts.end(transfer_id, common_pb2.ATTEMPT_OUTCOME_ABORTED, reason)
        return state

    async def _evicted(self, transfer_id: bytes) -> None:
        error = BlocksExhaustedError(
            "running requests needed its blocks", retry_after_seconds=EVICTED_SECONDS
        )
        await self.abort(transfer_id, error)

    async def cancel(self, attempt: DecodeAttempt) -> None:
        """End an attempt at once, committed or not; returns when its blocks are free."""
        state = await self.abort(attempt.transfer_id)
        if state is HandoffState.COMMITTED:
            engine_id = attempt.engine_id
            attempt.left_engine(await self._parts.host.call(lambda engine: engine.abort(engine_id)))
            error = CancelledError("cancelled")
            self.attempts.end(attempt.transfer_id, common_pb2.ATTEMPT_OUTCOME_CANCELLED, error)

    async def cancel_by_router(self, transfer_id: bytes) -> bool:
        """Cancel an attempt and forget it; returns whether there was one."""
        attempt = self.attempts.get(transfer_id)
        if attempt is None:
            # First of all: its Reserve or Run may be on the way, and would open an attempt that has no reader.
            self.attempts.remember_ended(transfer_id)
            await self._parts.background_tasks.complete(self.abort(transfer_id))
            return False
        await self.attempts.cancel(attempt)
        return True

    # --- draining ----------------------------------------------------------------------------------------

    def idle(self) -> bool:
        return len(self.attempts) == 0

    async def return_waiting(self) -> None:
        """Return attempts without a reservation, and local prefills that wait for their turn."""
        expected = DecodeState.EXPECTED
        await self._return([one for one in self.attempts.all() if one.machine.state is expected])

    async def return_all(self) -> None:
        await self._return(self.attempts.all())

    async def _return(self, attempts: list[DecodeAttempt]) -> None:
        """Return all at once: the engine is called between two steps, so that one by one each would take a step."""
        await asyncio.gather(*map(self._return_one, attempts))

    async def _return_one(self, attempt: DecodeAttempt) -> None:
        """Return an attempt to its router. Its log has all tokens computed so far before its end: the router continues
        after them."""
        error = DrainingError(f"{self._parts.identity.worker_id} is leaving")
        if attempt.machine.state not in (DecodeState.DECODING, DecodeState.ENDED):
            await self.abort(attempt.transfer_id, error)
        if attempt.machine.state is DecodeState.DECODING:  # perhaps only since then
            engine_id = attempt.engine_id
            attempt.left_engine(await self._parts.host.call(lambda engine: engine.abort(engine_id)))
            self.attempts.end(attempt.transfer_id, common_pb2.ATTEMPT_OUTCOME_PREEMPTED, error)

    # --- calls of the worker -----------------------------------------------------------------------------

    @property
    def routers(self) -> Routers:
        return self.attempts.routers

    async def start(self) -> None:
        if self._quarantines is not None:
            self._watching = asyncio.create_task(self._quarantines.run())

    def adapters_held(self) -> Collection[str]:
        return self.attempts.adapters_held()

    def on_output(self, output: StepOutput) -> None:
        self.attempts.on_output(output)

    def failed(self, error: BatonError) -> None:
        self.attempts.failed(error)

    async def fenced(self) -> None:
        await self.attempts.cancel_all()
        await self.receiver.rejoin(self._parts.identity.ref)

    def status(self, status: WorkerStatus) -> WorkerStatus:
        return metrics.add_status(status, self.attempts, self.receiver)

    def collectors(self) -> Sequence[Collector]:
        return metrics.collectors(self.attempts, self.receiver)

    def check_integrity(self) -> None:
        self.attempts.admission.check_integrity()
        self.receiver.check_integrity()

    def closers(self) -> Sequence[Callable[[], Awaitable[None]]]:
        return (self._stop_watching, self.attempts.close, self.receiver.close)

    async def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()


def _tokens(request: EngineRequest) -> int:
    return len(request.prompt_tokens) + len(request.output_tokens)
