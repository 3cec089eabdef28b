"""One attempt at a request: dispatched by a unary call, read over the links of its workers, as one stream of tokens.

prefill worker ──link──┐        ┌──► take: each token, at once, in the link's own callback
                       ├────────┤
decode worker ───link──┘        └──► events: how the attempt ended at each worker
                                     (the first token comes from whichever is faster)
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import grpc

from cluster import errors
from cluster.membership.types import WorkerInfo
from cluster.protocol.first_token import ends_with_first_token
from cluster.protocol.link import LINK_LOST_SECONDS
from cluster.protocol.times import LOST_SECONDS
from cluster.protocol.wire_version import WIRE_VERSION
from cluster.rpc import errors as rpc
from router.dispatch.answer_credit import AnswerCredit
from router.dispatch.arbiter import CONTROL_SECONDS, is_committed
from router.dispatch.attempt_events import Broken, Complete, Ended, Event, Source
from router.dispatch.batch_queue import BatchQueue
from router.dispatch.channels import Channels
from router.dispatch.choice import ChoiceStream
from router.dispatch.held_answer import HeldAnswer
from router.dispatch.prompt_stream import EmbeddingStream, PromptCredit, PromptStream
from router.link.handle import LinkHandle
from router.link.links import Links, no_message
from router.link.token import Token
from router.placement.types import Placed
from wire import common_pb2, decode_pb2, prefill_pb2

if TYPE_CHECKING:
    from cluster.telemetry.tracing.spans import OpenSpan

RUN_AGAIN_SECONDS = 0.1  # after a call that broke
IN_BAND_SECONDS = 0.3  # for a cancel over the link; then by a call


@dataclass
class Attempt:
    """One attempt at `choices`. `close` cancels at the workers what is not finished."""

    request_id: str
    spec: common_pb2.GenerateSpec
    placed: Placed
    channels: Channels
    links: Links
    choices: Sequence[ChoiceStream]
    admission_seconds: float
    # Called with each token, in the link's callback: a task would have to be woken for every one. False: not wanted
    take: Callable[[Token, Attempt], bool]
    # Makes a call once the client has every token so far
    when_drained: Callable[[Callable[[], None]], None]
    # Called when the prompt must be computed, though its log probabilities have not all come
    prefilled: Callable[[Attempt], None] = lambda _: None
    # Where log probabilities of the prompt are wanted, or its embedding
    prompt: PromptStream | EmbeddingStream | None = None
    transfer_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    started: float = field(default_factory=time.monotonic)
    finished: set[Source] = field(default_factory=set)  # have reported their end
    failed: set[Source] = field(default_factory=set)  # lost, with their part of the attempt
    responded: set[Source] = field(default_factory=set)  # have sent anything at all
    prefilled_at: float = 0.0  # when the first token came; 0 = none has
    prefill_report: common_pb2.WorkReport | None = None  # of the worker that computed the prompt
    span: OpenSpan | None = None  # where the request is traced

    def __post_init__(self) -> None:
        self.events: BatchQueue[Event] = BatchQueue()
        self._decode_lost = asyncio.Event()
        self._handles: dict[Source, LinkHandle] = {}
        self._dispatching: asyncio.Task[None] | None = None
        self._credit = AnswerCredit(self.choices)
        # The choice that stands for the prompt (Token.choice), the last one of its worker's log
        self._prompt_choice = self.spec.first_choice + max(1, len(self.choices))
        self._prompt_source: Source | None = None  # None: no log probabilities of the prompt are wanted
        self._held: HeldAnswer | None = None  # where another worker than the prompt's sends the answer
        if self.prompt is not None:
            self._prompt_source = Source.DECODE if self.is_local else Source.PREFILL
            self._prompt_credit = PromptCredit(self.spec.sampling.prompt_top_logprobs, self._grant_prompt)
            self._prompt_limit = self._prompt_credit.limit
            if not self.is_local:
                self._held = HeldAnswer(self._take_answer, self.events.add, self.broken)
        self._over = False  # no more tokens are taken
        self._committed = False  # as the decode worker has said

    @property
    def trip_seconds(self) -> float | None:
        """Seconds to its first token beyond the worker's own time: there and back, and both event loops. None: it
        had none, or its worker did not report."""
        report = self.prefill_report
        if report is None or not self.prefilled_at:
            return None
        work = report.prefill_queue_seconds + report.prefill_seconds
        return max(0.0, self.prefilled_at - self.started - work)

    def worker_of(self, source: Source) -> WorkerInfo:
        prefill = self.placed.prefill
        return prefill if source is Source.PREFILL and prefill is not None else self.placed.decode

    @property
    def is_local(self) -> bool:
        return self.placed.prefill is None

    def start(self) -> None:
        """Open the handles, so that nothing is missed, and dispatch."""
        decode, prefill = self.placed.decode, self.placed.prefill
        if prefill is None:
            self._open(Source.DECODE, decode)
        else:
            self._open(Source.PREFILL, prefill)
            if ends_with_first_token(self.spec):  # the prefill worker reserves at no decode worker either
                self.finished.add(Source.DECODE)
            else:
                self._open(Source.DECODE, decode)
        self._dispatching = asyncio.get_running_loop().create_task(self._dispatch())

    def _open(self, source: Source, worker: WorkerInfo) -> None:
        self._handles[source] = self.links.open(worker, _Reader(self, source))

    async def _dispatch(self) -> None:
        """Return once the worker has taken the request in; an error loses that worker's part of the attempt."""
        source = Source.DECODE if self.is_local else Source.PREFILL
        worker = self.worker_of(source)
        try:
            await self._run_until_answered(source, worker)
        except grpc.aio.AioRpcError as error:
            if source in self.responded | self.finished:
                return  # it was taken in: only the answer was lost
            reached = rpc.is_from_peer(error)
            (self.links.reached if reached else self.links.not_reached)(worker.name)
            silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not reached
            self.lost(source, no_message(LOST_SECONDS) if silent else rpc.error_from_rpc(error))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # This task was not cancelled: the channel was closed under the call.
            self.lost(source, errors.PeerLostError("the connection was closed"))

    async def _run_until_answered(self, source: Source, worker: WorkerInfo) -> None:
        """Run is repeated while its connection breaks and the worker's link does not: the worker takes a transfer id in
        once. Raises AioRpcError."""
        broken_until: float | None = None
        while self._handles:  # else the attempt has ended meanwhile
            try:
                await self._run(worker)
                self.links.reached(worker.name)
                return
            except grpc.aio.AioRpcError as error:
                now = time.monotonic()
                broken_until = broken_until or now + LINK_LOST_SECONDS
                over = now > broken_until or source in self.responded | self.finished | self.failed
                if over or rpc.is_from_peer(error) or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(RUN_AGAIN_SECONDS)

    async def _run(self, worker: WorkerInfo) -> None:
        deadline_ms = max(1, int(self.admission_seconds * 1000))  # 0 would be none
        if self.is_local:
            local = decode_pb2.DecodeRunRequest(
                wire_version=WIRE_VERSION,
                transfer_id=self.transfer_id,
                request_id=self.request_id,
                worker_epoch=worker.epoch,
                spec=self.spec,
                admission_deadline_ms=deadline_ms,
                handle=self._handles[Source.DECODE].reference,
            )
            await self.channels.decode(worker.address).Run(local, timeout=LOST_SECONDS)
            return
        decode = self.placed.decode
        remote = prefill_pb2.PrefillRunRequest(
            wire_version=WIRE_VERSION,
            transfer_id=self.transfer_id,
            request_id=self.request_id,
            worker_epoch=worker.epoch,
            spec=self.spec,
            decode=common_pb2.WorkerRef(
                worker_id=decode.worker_id, epoch=decode.epoch, address=decode.address
            ),
            admission_deadline_ms=deadline_ms,
            handle=self._handles[Source.PREFILL].reference,
        )
        if Source.DECODE in self._handles:
            remote.decode_handle.CopyFrom(self._handles[Source.DECODE].reference)
        await self.channels.prefill(worker.address).Run(remote, timeout=LOST_SECONDS)

    def grant(self) -> None:
        """The client has every token so far: allow the decode worker the window beyond."""
        handle = self._handles.get(Source.DECODE)
        if handle is not None and not self._over:
            self._credit.grant(handle.credit)

    def repeat_credit(self, source: Source) -> None:
        """Send a worker its present limits again."""
        handle = self._handles.get(source)
        if handle is None or self._over:
            return
        if source is Source.DECODE:
            self._credit.repeat(handle.credit)
        if source is self._prompt_source:
            handle.credit(self._prompt_choice, self._prompt_limit)

    def _grant_prompt(self, limit: int) -> None:
        handle = self._handles.get(Source.DECODE if self.is_local else Source.PREFILL)
        if handle is not None and not self._over:
            self._prompt_limit = limit
            handle.credit(self._prompt_choice, limit)

    def positions(self, source: Source) -> list[int]:
        """The next position of each choice of the worker's log."""
        positions = self._credit.positions()
        if self._held is not None and source is Source.DECODE:
            held = [self._held.next_position(choice.index) for choice in self.choices]
            return list(map(max, positions, held))
        if source is self._prompt_source:
            # An attempt begins at position 1, whatever an earlier one has brought: the stream's own position may be beyond
            # all that this attempt's worker may send.
            positions.append(self._prompt_credit.next_position)
        return positions

    def limits(self, source: Source) -> list[int]:
        """The limit of each choice of the worker's log."""
        return [*self._credit.limits(), *([self._prompt_limit] if source is self._prompt_source else [])]

    def received(self, source: Source, token: Token) -> None:
        """Take the token. What lies unread for a slow client is bounded by the limits, so they are enforced."""
        if self._over:
            return
        self.responded.add(source)
        if self.prompt is None and token.position < self._credit.bounds.get(token.choice, 0):
            self._take_answer(token)
        else:
            self._check_and_take(source, token)

    def _check_and_take(self, source: Source, token: Token) -> None:
        """Take a token where something of the prompt is wanted; break the attempt at one beyond its limit."""
        of_prompt = source is self._prompt_source and token.choice == self._prompt_choice
        bound = self._prompt_limit if of_prompt else self._credit.bounds.get(token.choice)
        if bound is None or token.position >= bound:
            where = f"position {token.position} of choice {token.choice}"
            self.broken(errors.PeerLostError(f"the {source.value} worker sent {where}; the limit is {bound}"))
        elif source is self._prompt_source and self._is_of_prompt(token, of_prompt):
            return
        elif self._held is not None and source is Source.DECODE and self._held.holds(token):
            self.prefilled(self)
        else:
            self._take_answer(token)

    def _is_of_prompt(self, token: Token, of_prompt: bool) -> bool:
        """Whether the token is dealt with, as it is of the prompt or comes before the prompt is complete."""
        assert self.prompt is not None
        if of_prompt:
            self._prompt_credit.received(token.position, self.when_drained)
        if not self.prompt.takes(token, self._prompt_choice, self.broken):
            return False
        if self._held is not None and self.prompt.complete:
            self._held.prompt_complete()
        return True

    def _take_answer(self, token: Token) -> None:
        if self._over:
            return
        if self._credit.received():
            self.when_drained(self.grant)
        if not self.take(token, self):
            self._credit.was_not_wanted(token)

    def broken(self, error: errors.BatonError) -> None:
        self.stop_reading()
        self.events.add(Broken(error))

    def complete(self) -> None:
        self.events.add(Complete())

    def stop_reading(self) -> None:
        """Take no more tokens: another attempt may be at the same choices."""
        self._over = True

    def reported_end(self, source: Source, end: common_pb2.AttemptEnd) -> None:
        self.responded.add(source)
        self.finished.add(source)
        self._ended(Ended(source, end))
        if self.has_ended:
            self._forget_handles()

    def _forget_handles(self) -> None:
        """They refer to the attempt: as garbage, all that the request had would stay until a collection, which holds every
        stream while it runs."""
        self._handles.clear()

    def _ended(self, ended: Ended) -> None:
        lacks_prompt = self.prompt is not None and not self.prompt.complete
        if ended.source is self._prompt_source and ended.is_done and lacks_prompt:
            self.broken(errors.PeerLostError("the worker ended before it had sent the whole prompt"))
        elif self._held is None:
            self.events.add(ended)
        elif ended.source is Source.PREFILL:
            self.events.add(ended)
            self._held.prompt_ended()
        elif not self._held.holds_end(ended):
            self.events.add(ended)

    def taken_in(self, source: Source) -> bool:
        """Whether the worker must have the attempt: its Run is answered; a decode worker opens a hand-off's by the prefill
        worker's Reserve, and has committed when that one has ended."""
        if source in self.responded:
            return True
        if source is Source.DECODE and not self.is_local:
            return self._committed or Source.PREFILL in self.finished
        return self._dispatching is not None and self._dispatching.done()

    def lost(self, source: Source, error: errors.BatonError) -> None:
        """The worker, or the link to it."""
        if source in self.failed:
            return
        self.failed.add(source)
        if source is Source.DECODE:
            self._decode_lost.set()
        self._ended(Ended(source, None, error))

    async def abort_unless_committed(self) -> bool:
        """Has D committed? Raises BatonError where D does not answer or is lost."""
        decode, lost = self.placed.decode, self._decode_lost
        self._committed = await is_committed(self.channels, decode, self.transfer_id, lost)
        return self._committed

    @property
    def has_ended(self) -> bool:
        """Every worker has reported its end: `close` has nothing to do."""
        waited_for = {Source.DECODE} if self.is_local else {Source.PREFILL, Source.DECODE}
        return waited_for <= self.finished

    async def close(self) -> None:
        """Cancels at both workers what has not ended; returns when they have answered or are out of reach."""
        if self._dispatching is not None:
            self._dispatching.cancel()
        open_handles = [pair for pair in self._handles.items() if pair[0] not in self.finished]
        self._forget_handles()
        await asyncio.gather(*(self._cancel(*pair) for pair in open_handles), return_exceptions=True)

    async def _cancel(self, source: Source, handle: LinkHandle) -> None:
        """Over the link; by a call where that is not up, or gives no answer."""
        try:
            if await handle.cancel(IN_BAND_SECONDS):
                return
            worker = self.worker_of(source)
            if source is Source.DECODE:
                decode = self.channels.decode(worker.address, control=True)
                request = decode_pb2.DecodeCancelRequest(transfer_id=self.transfer_id)
                await decode.Cancel(request, timeout=CONTROL_SECONDS)
            else:
                prefill = self.channels.prefill(worker.address, control=True)
                await prefill.Cancel(
                    prefill_pb2.PrefillCancelRequest(transfer_id=self.transfer_id), timeout=CONTROL_SECONDS
                )
        finally:
            handle.close()


class _Reader:
    """Implements router.link.handle.Reader for one worker of an attempt."""

    def __init__(self, attempt: Attempt, source: Source):
        self._attempt = attempt
        self._source = source
        self.token = partial(attempt.received, source)

    @property
    def transfer_id(self) -> bytes:
        return self._attempt.transfer_id

    def positions(self) -> list[int]:
        return self._attempt.positions(self._source)

    def limits(self) -> list[int]:
        return self._attempt.limits(self._source)

    def repeat_credit(self) -> None:
        self._attempt.repeat_credit(self._source)

    def ended(self, end: common_pb2.AttemptEnd) -> None:
        self._attempt.reported_end(self._source, end)

    @property
    def taken_in(self) -> bool:
        return self._attempt.taken_in(self._source)

    def lost(self, error: errors.BatonError) -> None:
        self._attempt.lost(self._source, error)
