"""The engine: requests in, tokens out, one step at a time. Every method is called on one thread."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import (
    BlocksExhaustedError,
    ContextLengthError,
    EngineRequestError,
    InvalidRequestError,
    engine_request_error,
)
from cluster.protocol.block_hash import hash_block, hash_blocks, pack_tokens
from cluster.state_machine import StateMachine
from engine.cache.block_pool import BlockPool
from engine.model.config import ModelConfig
from engine.next_tokens import Ends, Wanted, is_sound, next_tokens
from engine.plan import PlanItem, StepPlan
from engine.progress import StepSpan, note_computed
from engine.request import (
    ChainReport,
    EngineRequest,
    EngineReservation,
    EngineStats,
    RequestDone,
    StepOutput,
    TokenOutput,
)
from engine.scheduler.growth import HIGHEST_RANK, reservation_for
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Sequence, rank_of
from engine.scheduler.states import TRANSITIONS
from engine.scheduler.states import SequenceState as S
from engine.step_times import StepTimes

log = logging.getLogger(__name__)


class Runner(Protocol):
    model_config: ModelConfig
    num_blocks: int
    page_size: int
    config: EngineConfig

    def execute(self, plan: StepPlan) -> Tensor: ...


class Engine:
    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        secret: bytes,
        on_chain: Callable[[ChainReport], None] = lambda report: None,
    ):
        self._runner = runner
        self._config = config
        self._secret = secret
        self._on_chain = on_chain
        self._page = runner.page_size
        self._max_len = config.max_model_len or runner.model_config.max_model_len
        self._pool = BlockPool(runner.num_blocks, lambda chain, held: on_chain(ChainReport(chain, held)))
        self._requests: dict[str, list[Sequence]] = {}
        self._arrival = itertools.count()
        self.steps = 0
        self.step_items: list[PlanItem] = []  # of the last step; empty while the next one is scheduled
        self._count: Counter[str] = Counter()
        self._scheduler = Scheduler(config, self._pool, self, self._count)
        self.step_times = StepTimes()

    # --- requests --------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        self._check(request)
        self._scheduler.enqueue(self._make(request))

    def _check(self, request: EngineRequest) -> None:
        length = len(request.prompt_tokens) + len(request.output_tokens)
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request {request.request_id} is already here", field="request_id")
        if not request.prompt_tokens:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        if length >= self._max_len or self._scheduler.blocks_for(length) > self._pool.total:
            limit = str(self._max_len)
            what = f"{length} tokens do not fit a context of {limit}"
            raise ContextLengthError(what, field="prompt", limit=limit)

    def _make(self, request: EngineRequest) -> Sequence:
        tokens = [*request.prompt_tokens, *request.output_tokens]
        sequence = Sequence(request, request.first_choice, tokens, next(self._arrival))
        sequence.hashes = hash_blocks(pack_tokens(tokens), self._page, secret=self._secret, salt=request.salt)
        self._requests[request.request_id] = [sequence]
        return sequence

    def abort(self, request_id: str, verified_tokens: int = 0) -> bool:
        sequences = self._requests.pop(request_id, None)
        if sequences is None:
            return False
        for sequence in sequences:
            if sequence.state in (S.WAITING_FOR_KV, S.EVICTED) and verified_tokens:
                self._register(sequence, verified_tokens)
            self._finish(sequence)
        return True

    def park(self, request_id: str) -> None:
        """Stop computing the request but keep its blocks until `abort`: hand-off writes may still read them."""
        for sequence in self._requests.get(request_id, ()):
            self._scheduler.remove(sequence)
            if sequence.state is S.RUNNING:
                sequence.machine.to(S.HELD)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.state is S.FINISHED:
            return
        self._scheduler.remove(sequence)
        sequence.machine.to(S.FINISHED)
        self._pool.free(sequence.blocks)
        sequence.blocks = []

    def pause(self, request_id: str) -> None:
        for sequence in self._requests.get(request_id, ()):
            sequence.paused = True

    def resume(self, request_id: str) -> None:
        for sequence in self._requests.get(request_id, ()):
            sequence.paused = False

    def block_ids(self, request_id: str) -> list[int]:
        return list(self._requests[request_id][0].blocks)

    def cached_tokens(self, request_id: str) -> int:
        return self._requests[request_id][0].cached_tokens

    # --- hand-off ---------------------------------------------------------------------------------------

    def reserve(
        self, request: EngineRequest, block_hashes: Seq[bytes], growth_tokens: int
    ) -> EngineReservation:
        self._check(request)
        length = len(request.prompt_tokens) + len(request.output_tokens)
        hashes = list(block_hashes)[: length // self._page]
        held = self._pool.match(hashes) if self._config.prefix_caching else []
        total = self._scheduler.blocks_for(min(length + growth_tokens, self._max_len))
        growth = total - length // self._page  # what every further choice needs of its own
        need = total - len(held) + growth * (request.n - 1)
        if need > self._scheduler.room(held, rank_of(request)):
            raise BlocksExhaustedError(
                f"{need} KV blocks are needed, {self._pool.num_free} are free", retry_after_seconds=0.05
            )
        sequence = self._make(request)
        self._pool.retain(held)
        sequence.blocks = held + self._pool.allocate(total - len(held))
        sequence.registered_blocks = len(held)
        sequence.cached_tokens = len(held) * self._page
        sequence.machine = StateMachine(S.WAITING_FOR_KV, TRANSITIONS, request.request_id)
        return EngineReservation(sequence.blocks, sequence.cached_tokens)

    def commit(self, request_id: str, first_tokens: Seq[TokenOutput]) -> None:
        waiting = [s for s in self._requests.get(request_id, ()) if s.state is S.WAITING_FOR_KV]
        if not waiting:  # a step has asked for its blocks before this was its turn
            raise BlocksExhaustedError(f"nothing is reserved for {request_id}", retry_after_seconds=0.05)
        (sequence,) = waiting
        choices = {token.choice for token in first_tokens}
        if sequence.choice not in choices or all(token.finish is not None for token in first_tokens):
            raise InvalidRequestError("first_tokens: none continues the reservation", field="first_tokens")
        try:
            sequence.num_computed = len(sequence.tokens)
            self._register(sequence, len(sequence.tokens))
            sequence.machine.to(S.RUNNING)
            self._scheduler.running.append(sequence)
            self._fork(sequence, first_tokens)
        except Exception as error:  # all parts have landed, so no write can still reach its blocks
            self.abort(request_id)
            raise engine_request_error(error) from error

    def _fork(self, first: Sequence, tokens: Seq[TokenOutput]) -> None:
        """Gives every choice its first token; blocks are shared, the last one is copied when written to."""
        family = self._requests[first.request.request_id]
        for token in tokens:
            if token.choice == first.choice:
                continue
            sibling = Sequence(first.request, token.choice, [*first.tokens, token.token_id], first.arrival)
            sibling.num_computed = len(first.tokens)
            used = self._scheduler.blocks_for(len(first.tokens))
            sibling.hashes = list(first.hashes)
            sibling.registered_blocks = first.registered_blocks
            sibling.machine.to(S.RUNNING)
            self._pool.retain(first.blocks[:used])
            sibling.blocks = first.blocks[:used]
            family.append(sibling)  # before anything that can fail, so that `abort` frees its blocks
            if token.finish is None:
                self._scheduler.running.append(sibling)
            else:
                self._finish(sibling)
        own = [token for token in tokens if token.choice == first.choice]
        first.tokens.append(own[0].token_id)
        if own[0].finish is not None:
            self._finish(first)

    # --- a step -----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def step(self) -> StepOutput:
        began, self.step_items = time.monotonic(), []
        output = StepOutput([], [], [], began)
        scheduled = self._scheduler.schedule(output)
        if not scheduled:
            self._scheduler.copies.clear()  # of sequences that had to go after all: their blocks are others' now
            return output
        items = self.step_items = [
            PlanItem(
                request_id=s.request.request_id,
                token_ids=s.tokens[s.num_computed : s.num_computed + n],
                begin=s.num_computed,
                block_ids=s.blocks,
                wants_logits=n == s.missing,
                export=s.request.export,
            )
            for s, n in scheduled
        ]
        copies, self._scheduler.copies = self._scheduler.copies, []
        logits = self._runner.execute(StepPlan(items, copies))
        self.steps += 1
        tokens = sum(count for _, count in scheduled)
        self._advance(scheduled, StepSpan(began, time.monotonic(), tokens), output)
        wanting = [s for (s, _), item in zip(scheduled, items, strict=True) if item.wants_logits]
        self._sample(wanting, logits, output)
        self.step_times.add(tokens, len(scheduled), time.monotonic() - began)
        return output

    # --- when blocks are short (the scheduler asks) --------------------------------------------------------

    def evict_reservation(self, output: StepOutput, rank: int = HIGHEST_RANK) -> bool:
        """Its blocks stay its own until its owner calls `abort`: only he can tell that nobody writes to them."""
        everyone = [s for family in self._requests.values() for s in family]
        if any(s.state is S.EVICTED for s in everyone):
            return True
        if (victim := reservation_for(rank, everyone)) is None:
            return False
        victim.machine.to(S.EVICTED)
        output.evicted_reservations.append(victim.request.request_id)
        self._count["evicted"] += 1
        return True

    def return_to_router(self, victim: Sequence, output: StepOutput) -> bool:
        if not (limit := self._config.recompute_limit_tokens) or len(victim.tokens) <= limit:
            return False
        family = self._requests.pop(victim.request.request_id)
        output.done.append(self._done(family, preempted=True))
        for sequence in family:
            self._finish(sequence)
        return True

    # --- after the forward pass ----------------------------------------------------------------------------

    def _advance(self, scheduled: list[tuple[Sequence, int]], step: StepSpan, output: StepOutput) -> None:
        for sequence, count in scheduled:
            if sequence.state is not S.RUNNING:  # another choice of its request has failed
                continue
            try:
                note_computed(sequence, count, step, self._count)
                self._register(sequence, sequence.num_computed)
            except Exception as error:
                self._fail(sequence, engine_request_error(error), output)

    def forget_kv(self, request_id: str) -> None:
        """No other request finds what this one has computed, or found, in the prefix cache."""
        for sequence in self._requests.get(request_id, ()):
            self._pool.invalidate(sequence.blocks)

    def _fail(self, sequence: Sequence, error: EngineRequestError, output: StepOutput) -> None:
        """End the whole request. One that exports KV keeps its blocks until `abort`: they may still be read."""
        request_id = sequence.request.request_id
        level = logging.WARNING if error.field else logging.ERROR  # a field of the request is the reason
        log.log(level, "request %s failed: %s", request_id, error.message, exc_info=error.__cause__)
        output.done.append(replace(self._done(self._requests[request_id]), error=error))
        if sequence.request.export:
            self._scheduler.remove(sequence)
            sequence.machine.to(S.HELD)
        else:
            self.abort(request_id)

    def _register(self, sequence: Sequence, tokens: int) -> None:
        """The prefix cache learns of every block that the first `tokens` tokens fill."""
        full = tokens // self._page
        if full <= sequence.registered_blocks or not self._config.prefix_caching:
            return
        while len(sequence.hashes) < full:
            index = len(sequence.hashes)
            block = pack_tokens(sequence.tokens[index * self._page : (index + 1) * self._page])
            parent = sequence.hashes[-1] if sequence.hashes else None
            sequence.hashes.append(hash_block(parent, block, secret=self._secret, salt=sequence.request.salt))
        for index in range(sequence.registered_blocks, full):
            parent = sequence.hashes[index - 1] if index else None
            self._pool.register(sequence.blocks[index], sequence.hashes[index], parent)
        sequence.registered_blocks = full
        self._on_chain(ChainReport(sequence.hashes[:full], full))

    def _sample(self, sequences: list[Sequence], logits: Tensor, output: StepOutput) -> None:
        """Draw the next tokens. `sequences[i]` is the sequence of row i of `logits` [rows, vocab]."""
        wanted = [
            Wanted(sequence, row, self._new_choices(sequence))
            for row, sequence in enumerate(sequences)
            if sequence.state is S.RUNNING
        ]
        ends = Ends(self._runner.model_config.eos_token_ids, self._max_len)
        for one, answer in zip(wanted, next_tokens(wanted, logits, ends), strict=True):
            if one.sequence.state is not S.RUNNING:  # another choice of its request has failed
                continue
            try:
                if isinstance(answer, EngineRequestError):
                    raise answer
                self._took(one.sequence, answer, output)
                output.tokens.extend(answer)
                self._count["output"] += len(answer)
            except Exception as error:
                if not is_sound(logits[one.logits_row]):
                    self.forget_kv(one.sequence.request.request_id)
                self._fail(one.sequence, engine_request_error(error), output)

    def _new_choices(self, sequence: Sequence) -> int:
        """How many choices are drawn from its logits: all of them at the end of the prompt, then one."""
        request = sequence.request
        fresh = len(sequence.tokens) == sequence.num_prompt + len(request.output_tokens)
        return request.n if fresh and len(self._requests[request.request_id]) == 1 else 1

    def _took(self, sequence: Sequence, tokens: list[TokenOutput], output: StepOutput) -> None:
        request_id = sequence.request.request_id
        if sequence.request.prefill_only:
            self._scheduler.running.remove(sequence)
            sequence.machine.to(S.HELD)
            output.done.append(self._done([sequence]))
            return
        self._fork(sequence, tokens)
        family = self._requests[request_id]
        if all(s.state is S.FINISHED for s in family):
            output.done.append(self._done(family))
            del self._requests[request_id]

    def _done(self, family: list[Sequence], preempted: bool = False) -> RequestDone:
        first = family[0]
        return RequestDone(
            first.request.request_id,
            preempted,
            min(first.cached_tokens, first.num_prompt),
            first.computed_prompt_tokens,
            first.prompt_compute_seconds,
            tuple(first.chunks),
        )

    # --- facts ------------------------------------------------------------------------------------------

    def held_chains(self) -> Iterator[ChainReport]:
        for chain in self._pool.chains():
            yield ChainReport(chain, len(chain))

    def stats(self) -> EngineStats:
        """Any thread; the list of families is made in one go, so that a step may change them meanwhile."""
        everyone = [s for family in list(self._requests.values()) for s in family]
        running = list(self._scheduler.running)
        return EngineStats(
            steps=self.steps,
            running=len(running),
            waiting=len(self._scheduler.waiting),
            waiting_for_kv=sum(s.state is S.WAITING_FOR_KV for s in everyone),
            waiting_prefill_tokens=sum(s.missing for s in list(self._scheduler.waiting))
            + sum(s.missing for s in running if s.missing > 1),
            resident_tokens=sum(s.num_computed for s in running),
            blocks_total=self._pool.total,
            blocks_free=self._pool.num_free,
            blocks_held=self._pool.total - self._pool.num_free,
            prompt_tokens_computed=self._count["computed"],
            prompt_tokens_cached=self._count["cached"],
            output_tokens=self._count["output"],
            prefill_chunks=self._count["chunks"],
            preemptions=self._count["preemptions"],
            reservations_evicted=self._count["evicted"],
            prefill_seconds=self.step_times.total_seconds["prefill"],
            decode_seconds=self.step_times.total_seconds["decode"],
        )

    def check_integrity(self) -> None:
        """Between two steps: every reference on a block is some sequence's."""
        everyone = [s for family in self._requests.values() for s in family]
        self._pool.check_integrity(Counter(block for s in everyone for block in s.blocks))
