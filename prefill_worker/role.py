"""The prefill role: attempts that routers open, and how each ends (worker.role.Role)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from prometheus_client.registry import Collector

from cluster import errors
from cluster.membership.status import WorkerStatus
from engine.request import StepOutput
from kv_transfer.prefill_side.sender import HandoffSender
from prefill_worker import attempt_trace, metrics
from prefill_worker.attempt import PrefillAttempt, PrefillState
from prefill_worker.prefilling import Prefilling
from wire import common_pb2, prefill_pb2
from worker.attempts import Attempts
from worker.convert import outcome_counts, outcome_name
from worker.link.routers import Routers
from worker.role import RoleParts
from worker.validate import check_spec

log = logging.getLogger(__name__)
FREE_SECONDS = 1.0  # how long the answer to a cancel waits for writes that still read the request's blocks


class PrefillRole:
    def __init__(self, parts: RoleParts, sender: HandoffSender):
        self._parts = parts
        self._sender = sender
        self.attempts: Attempts[PrefillAttempt] = Attempts(
            cancel=self.cancel,
            cancel_by_router=self.cancel_by_router,
            max_attempts=parts.config.max_queued_requests,
        )
        self.prefilling = Prefilling(parts, sender)
        self.ended = outcome_counts()
        self._has_failed = False

    # --- calls of routers --------------------------------------------------------------------------------

    def open(self, request: prefill_pb2.PrefillRunRequest) -> PrefillAttempt:
        """The attempt of this transfer id: a repeated Run gets the first one's. Raises BatonError."""
        known = self.attempts.get(request.transfer_id)
        if known is not None:
            return known
        self._parts.identity.check_epoch(request.worker_epoch)
        self._parts.health.check_accepting()
        check_spec(request.spec, self._parts.identity.spec_limits)
        attempt = self.attempts.open(
            request.transfer_id, request.handle, request.spec, lambda log: PrefillAttempt(request, log)
        )
        self.prefilling.counts.arrived(attempt.token_count)
        attempt.trace = self._parts.trace_of(request.spec)
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
                self._send_end(attempt, end)

    async def cancel_by_router(self, transfer_id: bytes) -> bool:
        """Cancel an attempt, forget it, wait for its blocks; returns whether there was one."""
        attempt = self.attempts.get(transfer_id)
        if attempt is None:
            self.attempts.remember_ended(transfer_id)
            return False
        await self.attempts.cancel(attempt)
        await self.freed(attempt)
        return True

    async def freed(self, attempt: PrefillAttempt, seconds: float | None = None) -> bool:
        """Wait until an ended attempt holds no block. Returns False after `seconds` (default FREE_SECONDS): a write over
        TCP to a stopped decode worker may stay pending for ever."""
        try:
            async with asyncio.timeout(FREE_SECONDS if seconds is None else seconds):
                await attempt.freed.wait()
        except TimeoutError:
            return False
        return True

    # --- an attempt's life -------------------------------------------------------------------------------

    async def _run(self, attempt: PrefillAttempt) -> None:
        end = common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_ABORTED)
        try:
            await self.prefilling.run(attempt)
            end.outcome = common_pb2.ATTEMPT_OUTCOME_DONE
        except (errors.BlocksExhaustedError, errors.DrainingError) as error:
            # The decode worker has no room, or leaves.
            if not self._has_failed:
                end.outcome = common_pb2.ATTEMPT_OUTCOME_REFUSED
            end.error.CopyFrom(error.to_wire())
        except errors.AdapterMissingError as error:
            # Before its admission it is missing here, later at the decode worker.
            if attempt.machine.state is PrefillState.DRAINED:
                end.outcome = common_pb2.ATTEMPT_OUTCOME_REFUSED
            end.error.CopyFrom(error.to_wire())
        except errors.BatonError as error:
            end.error.CopyFrom(error.to_wire())
        except asyncio.CancelledError:
            self._was_cancelled(attempt, end)
        except Exception as error:
            request_id = attempt.request.request_id
            log.exception("request %s failed", request_id, extra={"request_id": request_id})
            end.error.CopyFrom(errors.InternalError(f"{type(error).__name__}: {error}").to_wire())
        self._send_end(attempt, end)

    def _was_cancelled(self, attempt: PrefillAttempt, end: common_pb2.AttemptEnd) -> None:
        if attempt.returned_to_router:
            end.outcome = common_pb2.ATTEMPT_OUTCOME_ABORTED
            end.error.CopyFrom(errors.DrainingError(f"{self._parts.identity.worker_id} is leaving").to_wire())
        else:
            end.outcome = common_pb2.ATTEMPT_OUTCOME_CANCELLED
            end.error.CopyFrom(errors.CancelledError("cancelled").to_wire())

    def _send_end(self, attempt: PrefillAttempt, end: common_pb2.AttemptEnd) -> None:
        self.ended[outcome_name(end.outcome)] += 1
        attempt.report.worker_id = self._parts.identity.worker_id
        end.report.CopyFrom(attempt.report)
        attempt.log.end(end)
        if attempt.trace is not None and self._parts.tracing is not None:
            attempt_trace.record(self._parts.tracing, attempt.trace, attempt, end)

    # --- draining ----------------------------------------------------------------------------------------

    def idle(self) -> bool:
        return len(self.attempts) == 0

    async def return_waiting(self) -> None:
        """Return attempts of which nothing has been computed or reserved."""
        queued = PrefillState.QUEUED
        await self._return([one for one in self.attempts.all() if one.machine.state is queued])

    async def return_all(self) -> None:
        await self._return(self.attempts.all())

    async def _return(self, attempts: list[PrefillAttempt]) -> None:
        """Cancel all at once: one by one, each cancelled attempt would let a queued one start."""
        for attempt in attempts:
            attempt.returned_to_router = True
        await asyncio.gather(*(self.cancel(attempt) for attempt in attempts))

    # --- calls of the worker -----------------------------------------------------------------------------

    @property
    def routers(self) -> Routers:
        return self.attempts.routers

    async def start(self) -> None:
        """Nothing runs beside the attempts."""

    def adapters_held(self) -> Collection[str]:
        return self.attempts.adapters_held()

    def on_output(self, output: StepOutput) -> None:
        self.prefilling.on_output(output)

    def failed(self, error: errors.BatonError) -> None:
        """End the attempts that the engine had with `error`, and return waiting ones to their routers. An
        EngineFailedError is for the attempts of the failed step only."""
        self._has_failed = True
        of_step = isinstance(error, errors.EngineFailedError)
        for attempt in self.attempts.all():
            prefilled, name = attempt.prefilled, attempt.engine_id
            in_engine = name in self.prefilling.by_engine_id
            held = in_engine and (not of_step or self._parts.host.in_failed_step(name))
            if held and not prefilled.done():
                prefilled.set_exception(error)
                prefilled.exception()  # marks it retrieved: the attempt may end without reading it
            elif of_step or prefilled.cancelled() or (prefilled.done() and prefilled.exception()):
                continue
            elif attempt.task is not None:
                attempt.returned_to_router = True
                attempt.task.cancel()

    async def fenced(self) -> None:
        await self.attempts.cancel_all()
        await self._sender.rejoin(self._parts.identity.ref)

    def status(self, status: WorkerStatus) -> WorkerStatus:
        return metrics.add_status(status, self.attempts, self.prefilling, self._sender)

    def collectors(self) -> Sequence[Collector]:
        return metrics.collectors(self.prefilling, self.ended, self._sender)

    def check_integrity(self) -> None:
        self.prefilling.admission.check_integrity()

    def closers(self) -> Sequence[Callable[[], Awaitable[None]]]:
        return (self.attempts.close, self._sender.close)
