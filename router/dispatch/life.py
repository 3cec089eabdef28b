"""The life of a request: placed, attempted, merged, and attempted again until every choice has its end.

PLACING → RUNNING → DONE
   ▲         │ worker lost, refused, preempted (the router alone retries, with a new transfer id)
   └─────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from cluster import errors
from cluster.block_hash import hash_blocks, index_keys, pack_tokens
from cluster.state_machine import StateMachine
from router.completion import Completion, Delta, Outcome
from router.dispatch.attempt import Attempt, Ended, Source, TokenCame
from router.dispatch.choice import ChoiceStream, GapError
from router.dispatch.hurry import Hurry
from router.dispatch.mailbox import Mailbox
from router.dispatch.patience import Patience
from router.dispatch.services import Services
from router.placement.types import Placed, PlacementRequest
from router.quota.quota import EXPECTED_OUTPUT_TOKENS
from wire import common_pb2, inference_pb2

log = logging.getLogger(__name__)
MAX_UNREAD_DELTAS = 512
PIECE_SECONDS = 0.001  # the pieces of a stream leave no closer: a write costs more than a token's other work


class LifeState(Enum):
    PLACING = "placing"
    RUNNING = "running"
    DONE = "done"


TRANSITIONS: dict[LifeState, frozenset[LifeState]] = {
    LifeState.PLACING: frozenset({LifeState.RUNNING, LifeState.DONE}),
    LifeState.RUNNING: frozenset({LifeState.PLACING, LifeState.DONE}),
}


class _Retry(Exception):
    """This attempt is over, another one may follow."""

    def __init__(self, reason: errors.BatonError, *, pause_seconds: float = 0.0):
        super().__init__(str(reason))
        self.reason = reason
        self.pause_seconds = pause_seconds


@dataclass
class Truth:
    """What is summed up over all attempts."""

    attempts: int = 0
    placement_calls: int = 0
    placement_seconds: float = 0.0
    prefill: common_pb2.WorkReport = field(default_factory=common_pb2.WorkReport)
    decode: common_pb2.WorkReport = field(default_factory=common_pb2.WorkReport)
    first_cached: int | None = None
    bytes_shipped: int = 0
    explanations: list[dict[str, object]] = field(default_factory=list)


class RequestLife:
    """`start` it with the mailbox its deltas go to; `outcome` tells the whole truth after the mailbox has ended."""

    def __init__(self, completion: Completion, services: Services, first_shown: int = 0):
        """`first_shown`: the number of its first choice in an answer to several prompts."""
        self._completion = completion
        self._services = services
        self._choices = [
            ChoiceStream(i, completion, services.text, first_shown + i) for i in range(completion.n)
        ]
        self._packed_prompt = pack_tokens(completion.prompt_tokens)
        self._truth = Truth()
        self._received = time.monotonic()
        self._started = self._received
        self._hurry = Hurry(services.config, completion, self._received)
        self._excluded: set[str] = set()
        self._deltas: Mailbox[Delta]
        self._work: asyncio.Task[None] | None = None
        self.worker_ids: list[str] = []
        self.first_token_seconds: float | None = None

    @property
    def choices(self) -> int:
        return len(self._choices)

    @property
    def complete(self) -> bool:
        return all(choice.finish is not None for choice in self._choices)

    def start(self, deltas: Mailbox[Delta]) -> None:
        """Ends as one producer of `deltas`, or fails it with the BatonError that ended the request."""
        self._started = time.monotonic()
        self._deltas = deltas
        self._work = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Cancels what is still going on; the workers are told."""
        if self._work is not None:
            self._work.cancel()

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self._completion.deadline_seconds), self._charged():
                await self._run_choices(self._choices)
        except TimeoutError:
            seconds = self._completion.deadline_seconds
            self._deltas.fail(errors.DeadlineError(f"not finished within {seconds:.1f} s", field="deadline"))
        except Exception as error:  # whoever reads the mailbox deals with it
            self._deltas.fail(error)
        else:
            self._deltas.end()

    @contextlib.asynccontextmanager
    async def _charged(self) -> AsyncIterator[None]:
        """To its tenant's quota: what it is expected to use, and at the end what it has used."""
        c, quota = self._completion, self._services.quota
        prompt = len(c.prompt_tokens)
        expected = prompt + c.n * min(c.sampling.max_tokens, EXPECTED_OUTPUT_TOKENS)
        charge = await quota.charge(c.tenant, c.rate_limits, expected)
        try:
            yield
        finally:
            if charge is not None:
                # Work that no worker has begun costs nothing: the request was refused, or nobody was there.
                served = self._truth.attempts > 0
                used = prompt + sum(choice.new_tokens for choice in self._choices) if served else 0
                self._services.clean_up(quota.settle(charge, used, served=served))

    async def _run_choices(self, choices: list[ChoiceStream]) -> None:
        """One attempt after another. Several choices are dispatched again one by one: they differ by now."""
        machine = StateMachine(LifeState.PLACING, TRANSITIONS, self._completion.request_id)
        config = self._services.config
        patience = Patience(config.max_attempts, self._hurry.admission_seconds)
        while True:
            before = sum(choice.new_tokens for choice in choices)
            try:
                attempt = await self._place(choices, patience.deadline)
                machine.to(LifeState.RUNNING)
                await self._attempt(attempt, choices)
            except _Retry as retry:
                log.info("attempt over: %s", retry, extra={"request_id": self._completion.request_id})
                progress = sum(choice.new_tokens for choice in choices) > before
                pause = patience.pause_seconds(
                    retry.reason,
                    retry.pause_seconds,
                    progress=progress,
                    costly=bool(attempt.lost & attempt.heard)
                    or isinstance(retry.reason, errors.InternalError),
                )
                await asyncio.sleep(pause)
                machine.to(LifeState.PLACING)
            else:
                machine.to(LifeState.DONE)
                return
            open_choices = [choice for choice in choices if choice.finish is None]
            if len(choices) > 1 and any(choice.output for choice in open_choices):
                async with asyncio.TaskGroup() as group:
                    for choice in open_choices:
                        group.create_task(self._run_choices([choice]))
                return

    # --- placing -----------------------------------------------------------------------------------------

    async def _place(self, choices: list[ChoiceStream], deadline: float) -> Attempt:
        c, config = self._completion, self._services.config
        output = choices[0].output if len(choices) == 1 else []
        token_count = len(c.prompt_tokens) + len(output)
        spec = self._spec(choices, output)
        packed = spec.prompt_tokens + spec.output_tokens
        hashes = hash_blocks(packed, config.page_size, secret=config.secret.encode(), salt=spec.salt)
        began = time.monotonic()
        taken_in = bool(self._truth.attempts or c.resume_tokens)  # it is not refused any more
        request = PlacementRequest(
            transfer_id=self._services.new_transfer_id(),
            chain=index_keys(hashes),
            token_count=token_count,
            output_tokens=min(c.sampling.max_tokens, 256) * len(choices),
            excluded=self._services.liveness.suspects | self._excluded,
            explain=c.explain,
            urgency=self._hurry.urgency,
            target_seconds=0.0 if taken_in else self._hurry.target_seconds,
            deadline_seconds=0.0 if taken_in else self._hurry.left_seconds,
        )
        placed = await self._place_until(request, deadline)
        self._truth.placement_seconds += time.monotonic() - began
        if c.explain:
            self._truth.explanations.append({"terms": placed.terms, "from_redis": placed.from_redis})
        attempt = Attempt(
            request_id=c.request_id,
            spec=spec,
            placed=placed,
            channels=self._services.channels,
            liveness=self._services.liveness,
            admission_seconds=self._hurry.worker_seconds(deadline),
            from_position=token_count,
            transfer_id=request.transfer_id,
        )
        self.worker_ids = [w.worker_id for w in (placed.prefill, placed.decode) if w is not None]
        return attempt

    async def _place_until(self, request: PlacementRequest, deadline: float) -> Placed:
        """Waits for workers to come back, up to the admission deadline."""
        while True:
            try:
                self._truth.placement_calls += 1
                return await self._services.placement.place(request)
            except errors.UnavailableError:
                self._truth.placement_calls -= 1  # nobody was there: the script was not asked
                if time.monotonic() + 0.1 > deadline:
                    raise
                await asyncio.sleep(0.1)

    def _spec(self, choices: list[ChoiceStream], output: list[int]) -> common_pb2.GenerateSpec:
        c = self._completion
        model_id = self._services.model_id()
        return common_pb2.GenerateSpec(
            model_id=model_id,
            prompt_tokens=self._packed_prompt,
            output_tokens=pack_tokens(output),
            sampling=c.sampling,
            first_choice=choices[0].index,
            n=len(choices),
            salt=self._services.salt(model_id, c.prefix_scope),
            priority=c.priority,
            tenant=c.tenant,
            weight=c.weight,
        )

    # --- one attempt -------------------------------------------------------------------------------------

    async def _attempt(self, attempt: Attempt, choices: list[ChoiceStream]) -> None:
        """Returns when every choice has its end. Raises _Retry, or the error that ends the request."""
        self._truth.attempts += 1
        attempt.start()
        try:
            while True:
                for event in await attempt.events.take():
                    if isinstance(event, TokenCame):
                        self._token(event, attempt, choices)
                    else:
                        await self._stream_ended(event, attempt, choices)
                if all(choice.finish is not None for choice in choices) and self._told_all(attempt, choices):
                    return
                if self._deltas.full:
                    await self._deltas.room()
        finally:
            self._services.placement.release(attempt.transfer_id)
            if not attempt.has_ended:
                self._services.clean_up(attempt.close())

    def _told_all(self, attempt: Attempt, choices: list[ChoiceStream]) -> bool:
        """The reports have come, as far as they will; an answer cut by a stop string does not wait for them."""
        waiting = {Source.DECODE} if attempt.is_local else {Source.PREFILL, Source.DECODE}
        return waiting <= attempt.finished | attempt.lost or self._completion.stop != ()

    def _token(self, event: TokenCame, attempt: Attempt, choices: list[ChoiceStream]) -> None:
        choice = choices[event.token.choice - choices[0].index]
        try:
            delta = choice.take(event.token)
        except GapError as gap:
            raise _Retry(errors.PeerLostError(str(gap))) from None
        if delta is not None:
            if self.first_token_seconds is None:
                self.first_token_seconds = time.monotonic() - self._received
            if not attempt.is_prefilled:
                attempt.is_prefilled = True
                self._services.placement.prefilled(attempt.transfer_id)
            self._deltas.add(delta)

    async def _stream_ended(self, event: Ended, attempt: Attempt, choices: list[ChoiceStream]) -> None:
        complete = all(choice.finish is not None for choice in choices)
        if event.end is not None:
            self._keep_report(event.source, event.end.report)
        if complete:
            return
        outcome = event.end.outcome if event.end is not None else None
        if outcome == common_pb2.ATTEMPT_OUTCOME_DONE:
            if event.source is Source.DECODE:
                raise _Retry(errors.PeerLostError("the decode worker ended early"))
            return
        reason = event.error or self._reason(event)
        if isinstance(reason, errors.InvalidRequestError):
            raise reason
        if outcome == common_pb2.ATTEMPT_OUTCOME_REFUSED:
            self._excluded = {attempt.placed.decode.worker_id}
            raise _Retry(reason, pause_seconds=reason.retry_after_seconds or 0.05)
        if outcome == common_pb2.ATTEMPT_OUTCOME_PREEMPTED:
            raise _Retry(errors.BlocksExhaustedError("the decode worker needed its blocks for others"))
        await self._decide(event, attempt, reason)

    @staticmethod
    def _reason(event: Ended) -> errors.BatonError:
        if event.end is not None and event.end.HasField("error"):
            return errors.from_wire(event.end.error)
        return errors.PeerLostError(f"the {event.source.value} worker gave the attempt up")

    async def _decide(self, event: Ended, attempt: Attempt, reason: errors.BatonError) -> None:
        """A worker was lost. If it was P, D alone says whether the attempt has committed."""
        placed = attempt.placed
        if event.source is Source.PREFILL and placed.prefill is not None:
            try:
                if await attempt.ask_arbiter():
                    return  # go on reading from D
            except errors.BatonError as error:
                self._excluded.add(placed.decode.worker_id)
                raise _Retry(error) from None
            if event.end is None:
                self._excluded.add(placed.prefill.worker_id)
        elif event.end is None:
            self._excluded.add(placed.decode.worker_id)
        raise _Retry(reason)

    def _keep_report(self, source: Source, report: common_pb2.WorkReport) -> None:
        truth = self._truth
        if source is Source.PREFILL:
            truth.prefill = report
        else:
            truth.decode = report
        truth.bytes_shipped += report.kv_bytes_shipped
        self._calibrate(report)
        is_first = truth.first_cached is None and (report.computed_prompt_tokens or report.cached_tokens)
        if is_first:
            truth.first_cached = report.cached_tokens

    def _calibrate(self, report: common_pb2.WorkReport) -> None:
        """What a worker measured corrects what placement assumes."""
        calibration = self._services.placement.calibration
        total = report.computed_prompt_tokens + report.cached_tokens
        calibration.observe_prefill(report.computed_prompt_tokens, total, report.prompt_compute_seconds)
        if report.kv_bytes_shipped:
            shipped = len(self._completion.prompt_tokens) - report.not_shipped_tokens
            calibration.observe_transfer(report.kv_bytes_shipped, shipped, report.handoff_exposed_seconds)

    # --- the end -----------------------------------------------------------------------------------------

    @cached_property
    def outcome(self) -> Outcome:
        truth, now = self._truth, time.monotonic()
        p, d = truth.prefill, truth.decode
        usage = inference_pb2.Usage(
            prompt_tokens=len(self._completion.prompt_tokens),
            completion_tokens=sum(len(choice.output) for choice in self._choices),
            cached_tokens=min(truth.first_cached or 0, len(self._completion.prompt_tokens)),
        )
        timings = inference_pb2.Timings(
            router_queue_seconds=self._started - self._received,
            placement_seconds=truth.placement_seconds,
            prefill_queue_seconds=p.prefill_queue_seconds + d.prefill_queue_seconds,
            prefill_seconds=p.prefill_seconds + d.prefill_seconds,
            handoff_exposed_seconds=p.handoff_exposed_seconds,
            decode_queue_seconds=d.decode_queue_seconds,
            decode_seconds=d.decode_seconds,
            total_seconds=now - self._received,
            kv_bytes_shipped=truth.bytes_shipped,
            not_shipped_tokens=p.not_shipped_tokens,
            transport=p.transport,
            prefill_worker=p.worker_id or d.worker_id,
            decode_worker=d.worker_id,
            attempts=truth.attempts,
            placement_calls=truth.placement_calls,
        )
        explanation = json.dumps(truth.explanations) if self._completion.explain else ""
        return Outcome(usage, timings, explanation)
