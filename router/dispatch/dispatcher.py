"""The life of a request: placed, attempted, merged, and attempted again until every choice has its end.

PLACING → RUNNING → DONE
   ▲         │ worker lost, refused, preempted (the router alone retries, with a new transfer id)
   └─────────┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum
from functools import cached_property

from cluster import errors
from cluster.protocol.first_token import ends_with_first_token
from cluster.state_machine import StateMachine
from router.dispatch.attempt import Attempt
from router.dispatch.attempt_events import Broken, Ended, Source
from router.dispatch.batch_queue import BatchQueue
from router.dispatch.choice import ChoiceStream, GapError
from router.dispatch.deadlines import RequestDeadlines
from router.dispatch.exclusions import ended_by
from router.dispatch.prompt_stream import prompt_stream_of
from router.dispatch.quota_lease import quota_lease
from router.dispatch.reports import AwaitedReports
from router.dispatch.request_placer import RequestPlacer
from router.dispatch.request_stats import RequestStats
from router.dispatch.retry_policy import Retry, RetryPolicy
from router.dispatch.services import Identity, Services
from router.link.token import Token
from router.observe import traces
from router.observe.traces import Arrival
from router.placement.candidates import level_of
from router.placement.types import Reason
from router.quota.quota import Use
from router.request.completion import Completion, Delta, Outcome
from wire import common_pb2

PIECE_SECONDS = 0.001  # the pieces of a stream leave no closer: a write costs more than a token's other work


class DispatchState(Enum):
    PLACING = "placing"
    RUNNING = "running"
    DONE = "done"


TRANSITIONS: dict[DispatchState, frozenset[DispatchState]] = {
    DispatchState.PLACING: frozenset({DispatchState.RUNNING, DispatchState.DONE}),
    DispatchState.RUNNING: frozenset({DispatchState.PLACING, DispatchState.DONE}),
}


class RequestDispatcher:
    """`start` it with the queue its deltas go to; `outcome` is complete after the queue has ended."""

    def __init__(
        self,
        completion: Completion,
        services: Services,
        first_shown: int = 0,
        arrival: Arrival | None = None,
        identity: Identity | None = None,
    ):
        """`first_shown`: the number of its first choice in an answer to several prompts. `identity`: of the completion,
        where it was needed before."""
        self._completion = completion
        self._services = services
        self._identity = identity or services.identify(completion)
        self._resumed = self._identity.resumed
        model = completion.served_model
        self._token_times = services.token_times_of(model)
        self._choices = [
            ChoiceStream(i, completion, services.text_of(model), first_shown + i) for i in range(completion.n)
        ]
        self._prompt = prompt_stream_of(completion, self._forward_prompt)
        self._first_shown = first_shown
        self.stats = RequestStats()
        arrival = arrival or Arrival()
        self._received = self._started = arrival.received
        self._trace = services.begin_trace(arrival, completion)
        self.trace_id = self._trace.trace_id if self._trace is not None else ""
        self._deadlines = RequestDeadlines(services.config, completion, time.monotonic())
        self._placer = RequestPlacer(
            completion, services, self._deadlines, self.stats, self._identity.packed_prompt
        )
        self.on_charged: Callable[[], None] = lambda: None  # called where the tenant has limits
        self._deltas: BatchQueue[Delta]
        self._work: asyncio.Task[None] | None = None
        self.worker_ids: list[str] = []
        self.first_token_seconds: float | None = None
        self.failure = ""  # the error's class, if neither its client nor its last token ended it

    @property
    def tenant(self) -> str:
        return self._completion.tenant

    @property
    def model(self) -> str:
        """The name of the model whose workers answer it."""
        return self._completion.served_model or self._services.config.served_name

    @property
    def choices(self) -> int:
        return len(self._choices)

    @property
    def _lacks_prompt(self) -> bool:
        """Log probabilities of the prompt, or its embedding, are still to come: the answer waits for them."""
        return self._prompt is not None and not self._prompt.complete

    @property
    def complete(self) -> bool:
        return all(choice.finish is not None for choice in self._choices)

    @cached_property
    def _name(self) -> bytes:
        """At every router. Made where it is needed: for a quota or a ticket."""
        packed, name, _ = self._identity
        return self._services.name_of(self._completion, packed) if name is None else name

    def resume_ticket(self) -> bytes:
        """The ticket with which its client resumes it at another router."""
        return self._services.tickets.issue(self._completion, self._name)

    def start(self, deltas: BatchQueue[Delta]) -> None:
        """Ends as one producer of `deltas`, or fails it with the BatonError that ended the request."""
        self._started = time.monotonic()
        self._deltas = deltas
        self._work = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Cancel what is still running, at the workers too."""
        if self._work is not None:
            self._work.cancel()

    async def _run(self) -> None:
        try:
            async with (
                asyncio.timeout(self._completion.deadline_seconds),
                quota_lease(
                    self._services, self._completion, lambda: self._name, resumed=self._resumed, use=self._use
                ),
            ):
                if self._completion.rate_limits or self._completion.model_rate_limits:
                    self.on_charged()
                await self._choices[0].read_resumed()  # a resumed request has one choice
                await self._run_choices(self._choices)
        except TimeoutError:  # of an answer that is whole, reports of its workers are all that is missing
            self._end(None if self.complete and not self._lacks_prompt else self._deadlines.missed())
        except Exception as error:  # the reader of the queue deals with it
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if error is None:
            self._services.faults.done(self._completion.request_id)
            self._deltas.end()
        else:
            self.failure = type(error).__name__
            self._deltas.fail(error)

    def _use(self) -> Use | None:
        """The tokens to charge to the quota; None: no worker has begun work for the request."""
        if not self.stats.attempts and not self._resumed:
            return None
        held = len(self._completion.resume_tokens)
        new = 0 if self._completion.prompt_only else sum(choice.new_tokens for choice in self._choices)
        return Use(len(self._completion.prompt_tokens), held + new, finished=self.complete)

    async def _run_choices(self, choices: list[ChoiceStream]) -> None:
        """One attempt after another. Several choices are dispatched again one by one: they differ by now."""
        machine = StateMachine(DispatchState.PLACING, TRANSITIONS, self._completion.request_id)
        retry_policy = RetryPolicy(self._services.config.max_attempts, self._deadlines.admission_seconds)
        while True:
            before = sum(choice.new_tokens for choice in choices)
            try:
                attempt = await self._place(choices, retry_policy.deadline)
                machine.to(DispatchState.RUNNING)
                await self._attempt(attempt, choices)
            except Retry as retry:
                if all(choice.finish is not None for choice in choices):  # its last tokens came meanwhile
                    machine.to(DispatchState.DONE)
                    return
                self.stats.retry(retry.reason, self._completion.request_id)
                progress = sum(choice.new_tokens for choice in choices) > before
                lost = attempt.failed & attempt.responded
                costly = bool(lost) or isinstance(retry.reason, errors.InternalError)
                pause = retry_policy.pause_seconds(
                    retry.reason, retry.pause_seconds, progress=progress, costly=costly
                )
                await asyncio.sleep(pause)
                if self.stats.begun:  # each attempt brings a window, also where nothing is read
                    retry_policy.deadline += await self._deltas.drained()
                machine.to(DispatchState.PLACING)
            else:
                machine.to(DispatchState.DONE)
                return
            open_choices = [choice for choice in choices if choice.finish is None]
            if len(choices) > 1 and any(choice.output for choice in open_choices):
                try:
                    async with asyncio.TaskGroup() as group:
                        for choice in open_choices:
                            group.create_task(self._run_choices([choice]))
                except BaseExceptionGroup as failed:  # a client gets one, as from a request with one choice
                    raise errors.first_of(failed) from failed
                return

    async def _place(self, choices: list[ChoiceStream], deadline: float) -> Attempt:
        c = self._completion
        began = time.monotonic()
        self._services.check_any_worker()
        spec, request, placed = await self._placer.place(choices, deadline, scores=self._lacks_prompt)
        ended = time.monotonic()
        self.stats.placement_seconds += ended - began
        if c.explain:
            self.stats.explanations.append(placed.explanation)
        attempt = Attempt(
            request_id=c.request_id,
            spec=spec,
            placed=placed,
            channels=self._services.channels,
            links=self._services.links,
            choices=choices,
            admission_seconds=self._deadlines.worker_seconds(deadline),
            take=self._take,
            prompt=self._prompt if self._lacks_prompt or c.sampling.pooling else None,  # a vector comes again
            prefilled=self._prefilled,
            when_drained=self._deltas.when_drained,
            transfer_id=request.transfer_id,
        )
        if self._trace is not None:
            attempt.span = self._trace.placed(began, ended, placed, spec)
        self.worker_ids = [w.worker_id for w in (placed.prefill, placed.decode) if w is not None]
        return attempt

    async def _attempt(self, attempt: Attempt, choices: list[ChoiceStream]) -> None:
        """Returns when every choice has its end. Raises Retry, or the error that ends the request."""
        self.stats.attempts += 1
        reports = AwaitedReports(attempt, self._services.clean_up)
        try:
            self._services.faults.placed(attempt.transfer_id)
            attempt.start()
            while True:
                for event in await attempt.events.take():
                    if isinstance(event, Broken):
                        if isinstance(event.error, errors.UnreadableAnswerError):
                            raise event.error
                        self._placer.broke_protocol(attempt.worker_of(one) for one in attempt.responded)
                        raise Retry(event.error)
                    if isinstance(event, Ended):
                        await self._stream_ended(event, attempt, choices)
                if all(choice.finish is not None for choice in choices) and reports.are_here():
                    return
        except Retry as retry:
            traces.failed(attempt.span, retry.reason)
            raise
        finally:
            attempt.stop_reading()
            self.stats.trip_seconds = attempt.trip_seconds or self.stats.trip_seconds
            if self._trace is not None:
                self._trace.attempt_over(attempt.span, attempt.started, attempt.trip_seconds)
            self._services.placement.release(attempt.transfer_id)
            if not attempt.has_ended:
                self._services.clean_up(attempt.close())

    def _take(self, token: Token, attempt: Attempt) -> bool:
        """Forward one token; False if it is not wanted. Called by the link: the request's task is woken only where an
        attempt ends."""
        self._services.faults.token(attempt.transfer_id)
        choice = self._choices[token.choice]
        try:
            delta = choice.take(token)
        except (GapError, errors.UnreadableAnswerError) as error:
            attempt.broken(errors.PeerLostError(str(error)) if isinstance(error, GapError) else error)
            return False
        if delta is None:
            return False
        now = self._token_times.now()
        before, choice.last_received = choice.last_received, now
        if before is not None:
            self._token_times.gap(now - before, self.trace_id)
        else:
            self._note_first()
        if not attempt.prefilled_at:
            self._prefilled(attempt)
        self._deltas.add(delta)
        if delta.finish is not None and all(one.finish is not None for one in attempt.choices):
            attempt.complete()
        return True

    def _prefilled(self, attempt: Attempt) -> None:
        """A token of the answer came."""
        if not attempt.prefilled_at:
            attempt.prefilled_at = time.monotonic()
            self._services.placement.prefilled(attempt.transfer_id)

    def _forward_prompt(self, token: Token) -> None:
        """A token of the prompt came with its log probability, or its embedding: each choice shows it."""
        self.stats.begun = True
        for index in range(self.choices):
            self._deltas.add(Delta(self._first_shown + index, "", (), prompt=(token,)))

    def _note_first(self) -> None:
        """The first token of a choice came."""
        self.stats.begun = True
        first: float | None = None
        if self.first_token_seconds is None:
            self.first_token_seconds = first = time.monotonic() - self._received
        self._token_times.first(first)

    async def _stream_ended(self, event: Ended, attempt: Attempt, choices: list[ChoiceStream]) -> None:
        complete = all(choice.finish is not None for choice in choices)
        if event.end is not None:
            report = self._services.work_reports.checked(
                event.end.report,
                attempt.worker_of(event.source).worker_id,
                seconds=time.monotonic() - attempt.started,
                tokens=len(self._completion.prompt_tokens) + self._completion.sampling.max_tokens,
            )
            if event.source is Source.PREFILL or attempt.is_local:
                attempt.prefill_report = report
            self._keep_report(event.source, report, attempt)
        outcome = event.end.outcome if event.end is not None else None
        handed_over = event.source is Source.PREFILL and not ends_with_first_token(attempt.spec)
        if handed_over and outcome == common_pb2.ATTEMPT_OUTCOME_DONE:
            self._services.pairs.reached(attempt.placed)
        if complete:
            return
        if outcome == common_pb2.ATTEMPT_OUTCOME_DONE:
            if event.source is Source.DECODE or ends_with_first_token(attempt.spec):
                self._placer.broke_protocol([attempt.worker_of(event.source)])
                raise Retry(errors.PeerLostError(f"the {event.source.value} worker ended early"))
            return
        reason = event.reason
        self._placer.engine_failures.note(attempt.worker_of(event.source), reason, attempt.started)
        if isinstance(reason, errors.InvalidRequestError | errors.DeadEndError):
            raise reason
        if isinstance(reason, errors.AdapterMissingError):
            refused = outcome == common_pb2.ATTEMPT_OUTCOME_REFUSED  # by the decode worker
            worker = attempt.placed.decode if refused else attempt.worker_of(event.source)
            self._placer.excluded[worker.worker_id] = Reason.ADAPTER
            raise Retry(reason)
        if event.had_no_room:
            self._placer.refused_by(attempt.placed.decode.worker_id)
            raise Retry(reason, pause_seconds=reason.retry_after_seconds or 0.05)
        if outcome == common_pb2.ATTEMPT_OUTCOME_PREEMPTED:
            if isinstance(reason, errors.DrainingError):
                self._placer.excluded[attempt.placed.decode.worker_id] = Reason.DRAINED
                raise Retry(reason)
            text = "the decode worker preempted the request for lack of KV blocks"
            raise Retry(errors.BlocksExhaustedError(text))
        await self._after_worker_loss(event, attempt, reason)

    async def _after_worker_loss(self, event: Ended, attempt: Attempt, reason: errors.BatonError) -> None:
        """A worker was lost. If it was P, D alone says whether the attempt has committed; with a part of the prompt's log
        probabilities the whole attempt is lost, and an attempt that ends at P has no D."""
        placed = attempt.placed
        may_go_on = not self._lacks_prompt and not ends_with_first_token(attempt.spec)
        if event.source is Source.PREFILL and placed.prefill is not None:
            try:
                if may_go_on and await attempt.abort_unless_committed():
                    return  # go on reading from D
            except errors.BatonError as error:
                self._placer.excluded[placed.decode.worker_id] = Reason.UNANSWERED
                raise Retry(error) from None
            if event.end is None or isinstance(reason, errors.DrainingError):
                self._placer.excluded[placed.prefill.worker_id] = ended_by(event)
            elif isinstance(reason, errors.HandoffError):
                # P lives and could not reach D: a further hand-off between the two may fail as well.
                self._placer.excluded[placed.decode.worker_id] = Reason.HANDOFF
                self._services.pairs.failed(placed, reason)
        elif event.end is None or isinstance(reason, errors.DrainingError):
            self._placer.excluded[placed.decode.worker_id] = ended_by(event)
        raise Retry(reason)

    def _keep_report(self, source: Source, report: common_pb2.WorkReport, attempt: Attempt) -> None:
        placed, scored = attempt.placed, attempt.spec.sampling.prompt_logprobs
        self.stats.keep(report, of_prefill=source is Source.PREFILL)
        self._services.recorder.handed_over(placed, report)
        level = level_of(placed.prefill, placed.decode) if placed.prefill is not None else None
        # What a worker measured corrects what placement assumes.
        calibration = self._services.placement.calibrations.of(self._completion.served_model)
        calibration.learn(report, len(self._completion.prompt_tokens), level, scored=scored)

    @cached_property
    def outcome(self) -> Outcome:
        return self.stats.outcome(
            self._completion,
            self._choices,
            queue_seconds=self._started - self._received,
            total_seconds=time.monotonic() - self._received,
        )

    def finish_trace(self, result: str) -> None:
        if self._trace is not None:
            self._trace.finish(result, self.outcome, self.first_token_seconds)
