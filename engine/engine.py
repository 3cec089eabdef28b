"""The engine: requests in, tokens out, one step at a time. Every method is called on one thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cluster.block_hash import hash_block, hash_blocks, pack_tokens
from cluster.config import EngineConfig
from cluster.errors import BlocksExhaustedError, ContextLengthError, InvalidRequestError
from engine.cache.block_pool import BlockPool
from engine.model.config import ModelConfig
from engine.plan import BlockCopy, PlanItem, StepPlan
from engine.request import (
    ChainReport,
    EngineRequest,
    EngineStats,
    RequestDone,
    StepOutput,
    TokenOutput,
)
from engine.sampling.sampler import Row, sample
from engine.scheduler.sequence import Sequence
from engine.scheduler.states import SequenceState as S
from engine.stop import finish_reason, forbidden


class Runner(Protocol):
    model_config: ModelConfig
    num_blocks: int
    page_size: int
    config: EngineConfig

    def execute(self, plan: StepPlan) -> Tensor: ...


@dataclass(frozen=True)
class EngineReservation:
    block_ids: list[int]
    held_tokens: int


class Engine:
    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        secret: bytes,
        on_chain: Callable[[ChainReport], None] = lambda report: None,
        recompute_limit_tokens: int = 0,
    ):
        self._runner = runner
        self._config = config
        self._secret = secret
        self._on_chain = on_chain
        self._recompute_limit = recompute_limit_tokens
        self._page = runner.page_size
        self._max_len = config.max_model_len or runner.model_config.max_model_len
        self._pool = BlockPool(runner.num_blocks, lambda chain, held: on_chain(ChainReport(chain, held)))
        self._requests: dict[str, list[Sequence]] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._copies: list[BlockCopy] = []
        self._arrival = itertools.count()
        self.steps = 0
        self._count = dict.fromkeys(("computed", "cached", "output", "chunks", "preemptions", "evicted"), 0)
        self._seconds = {"prefill": 0.0, "decode": 0.0}

    # --- requests --------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        self._check(request)
        self._waiting.append(self._make(request))
        self._waiting.sort(key=lambda s: s.order)

    def _check(self, request: EngineRequest) -> None:
        length = len(request.prompt_tokens) + len(request.output_tokens)
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request {request.request_id} is already here", field="request_id")
        if not request.prompt_tokens:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        if length >= self._max_len or self._blocks_for(length) > self._pool.total:
            raise ContextLengthError(
                f"{length} tokens do not fit a context of {self._max_len}",
                field="prompt",
                limit=str(self._max_len),
            )

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
            if sequence.state is S.WAITING_FOR_KV and verified_tokens:
                self._register(sequence, verified_tokens)
            self._finish(sequence)
        return True

    def release(self, request_id: str) -> None:
        self.abort(request_id)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.state is S.FINISHED:
            return
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        sequence.machine.to(S.FINISHED)
        self._pool.drop(sequence.blocks)
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
        total = self._blocks_for(min(length + growth_tokens, self._max_len))
        growth = total - length // self._page  # what every further choice needs of its own
        need = total - len(held) + growth * (request.n - 1)
        if need > self._pool.free - self._pool.free_among(held):
            raise BlocksExhaustedError(
                f"{need} KV blocks are needed, {self._pool.free} are free", retry_after_seconds=0.05
            )
        sequence = self._make(request)
        self._pool.hold(held)
        sequence.blocks = held + self._pool.take(total - len(held))
        sequence.registered_blocks = len(held)
        sequence.cached_tokens = len(held) * self._page
        sequence.machine = self._waiting_for_kv(sequence)
        return EngineReservation(sequence.blocks, sequence.cached_tokens)

    def _waiting_for_kv(self, sequence: Sequence):  # type: ignore[no-untyped-def]
        from cluster.state_machine import StateMachine
        from engine.scheduler.states import TRANSITIONS

        return StateMachine(S.WAITING_FOR_KV, TRANSITIONS, sequence.request.request_id)

    def commit(self, request_id: str, first_tokens: Seq[TokenOutput]) -> None:
        (sequence,) = self._requests[request_id]
        sequence.num_computed = len(sequence.tokens)
        self._register(sequence, len(sequence.tokens))
        sequence.machine.to(S.RUNNING)
        self._running.append(sequence)
        self._fork(sequence, first_tokens)

    def _fork(self, first: Sequence, tokens: Seq[TokenOutput]) -> None:
        """Gives every choice its first token; blocks are shared, the last one is copied when written to."""
        family = self._requests[first.request.request_id]
        for token in tokens:
            if token.choice == first.choice:
                continue
            sibling = Sequence(first.request, token.choice, [*first.tokens, token.token_id], first.arrival)
            sibling.num_computed = len(first.tokens)
            used = self._blocks_for(len(first.tokens))
            sibling.blocks = first.blocks[:used]
            self._pool.hold(sibling.blocks)
            sibling.hashes = list(first.hashes)
            sibling.registered_blocks = first.registered_blocks
            sibling.machine.to(S.RUNNING)
            family.append(sibling)
            if token.finish is None:
                self._running.append(sibling)
            else:
                self._finish(sibling)
        own = [token for token in tokens if token.choice == first.choice]
        first.tokens.append(own[0].token_id)
        if own[0].finish is not None:
            self._finish(first)

    # --- a step -----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or any(not s.paused for s in self._running)

    def step(self) -> StepOutput:
        output = StepOutput([], [], [])
        began = time.perf_counter()
        scheduled = self._schedule(output)
        if not scheduled:
            return output
        items = [
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
        copies, self._copies = self._copies, []
        logits = self._runner.execute(StepPlan(items, copies))
        self.steps += 1
        self._advance(scheduled)
        self._sample([s for s, n in scheduled if s.missing == 0], logits, output)
        prefilling = any(n > 1 for _, n in scheduled)
        self._seconds["prefill" if prefilling else "decode"] += time.perf_counter() - began
        return output

    def _schedule(self, output: StepOutput) -> list[tuple[Sequence, int]]:
        budget = self._config.max_batch_tokens
        scheduled: list[tuple[Sequence, int]] = []
        for sequence in sorted(self._running, key=lambda s: (s.missing > 1, *s.order)):
            if sequence.paused or sequence.state is not S.RUNNING or budget <= 0:
                continue
            count = min(sequence.missing, budget)
            if not self._grow(sequence, sequence.num_computed + count, output, {id(s) for s, _ in scheduled}):
                continue
            scheduled.append((sequence, count))
            budget -= count
        scheduled = [(s, n) for s, n in scheduled if s.state is S.RUNNING]
        while self._waiting and budget > 0 and len(self._running) < self._config.max_batch_requests:
            sequence = self._waiting[0]
            count = self._admit(sequence, budget, bool(scheduled))
            if count == 0:
                break
            scheduled.append((sequence, count))
            budget -= count
        return scheduled

    def _admit(self, sequence: Sequence, budget: int, others: bool) -> int:
        held: list[int] = []
        if self._config.prefix_caching:
            held = self._pool.match(sequence.hashes[: (len(sequence.tokens) - 1) // self._page])
        missing = len(sequence.tokens) - len(held) * self._page
        if not self._config.chunked_prefill:
            if others and missing > budget:
                return 0
            count = missing
        else:
            count = min(missing, budget)
        need = self._blocks_for(len(sequence.tokens)) - len(held)
        if need > self._pool.free - self._pool.free_among(held):
            return 0
        self._pool.hold(held)
        sequence.blocks = held + self._pool.take(need)
        sequence.num_computed = sequence.cached_tokens = len(held) * self._page
        sequence.registered_blocks = len(held)
        self._count["cached"] += sequence.cached_tokens
        self._waiting.pop(0)
        sequence.machine.to(S.RUNNING)
        self._running.append(sequence)
        return count

    def _grow(self, sequence: Sequence, tokens: int, output: StepOutput, busy: set[int]) -> bool:
        """Blocks for the first `tokens` tokens, the written ones its own. False: it was preempted itself."""
        need = self._blocks_for(tokens) - len(sequence.blocks)
        tail = sequence.num_computed // self._page
        copy = tail < len(sequence.blocks) and self._pool.shared(sequence.blocks[tail])
        while max(need, 0) + copy > self._pool.free:
            if not self._make_room(sequence, output, busy):
                return False
        if copy:
            (fresh,) = self._pool.take(1)
            self._copies.append(BlockCopy(sequence.blocks[tail], fresh))
            self._pool.drop([sequence.blocks[tail]])
            sequence.blocks[tail] = fresh
        if need > 0:
            sequence.blocks.extend(self._pool.take(need))
        return True

    def _make_room(self, wanting: Sequence, output: StepOutput, busy: set[int]) -> bool:
        reserved = [s for family in self._requests.values() for s in family if s.state is S.WAITING_FOR_KV]
        if reserved:
            youngest = max(reserved, key=lambda s: s.arrival)
            output.evicted_reservations.append(youngest.request.request_id)
            self._count["evicted"] += 1
            self.abort(youngest.request.request_id)
            return True
        victims = [s for s in self._running if id(s) not in busy or s is wanting]
        victim = max(victims, key=lambda s: s.order)
        self._preempt(victim, output)
        return victim is not wanting

    def _preempt(self, victim: Sequence, output: StepOutput) -> None:
        self._count["preemptions"] += 1
        self._running.remove(victim)
        self._pool.drop(victim.blocks)
        victim.blocks = []
        victim.num_computed = victim.registered_blocks = 0
        victim.machine.to(S.WAITING)
        if self._recompute_limit and len(victim.tokens) > self._recompute_limit:
            family = self._requests.pop(victim.request.request_id)
            output.done.append(self._done(family, preempted=True))
            for sequence in family:
                self._finish(sequence)
            return
        self._waiting.append(victim)
        self._waiting.sort(key=lambda s: s.order)

    def _advance(self, scheduled: list[tuple[Sequence, int]]) -> None:
        for sequence, count in scheduled:
            prompt = max(0, min(sequence.num_computed + count, sequence.num_prompt) - sequence.num_computed)
            sequence.computed_prompt_tokens += prompt
            self._count["computed"] += prompt
            if prompt and (count < sequence.missing or sequence.chunks):
                sequence.chunks += 1
                self._count["chunks"] += 1
            sequence.num_computed += count
            self._register(sequence, sequence.num_computed)

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
            self._pool.remember(sequence.blocks[index], sequence.hashes[index], parent)
        sequence.registered_blocks = full
        self._on_chain(ChainReport(sequence.hashes[:full], full))

    def _sample(self, sequences: list[Sequence], logits: Tensor, output: StepOutput) -> None:
        rows: list[Row] = []
        owners: list[Sequence] = []
        source: list[int] = []
        eos = self._runner.model_config.eos_token_ids
        for index, sequence in enumerate(sequences):
            fresh = len(self._requests[sequence.request.request_id]) == 1 and len(
                sequence.tokens
            ) == sequence.num_prompt + len(sequence.request.output_tokens)
            n = sequence.request.n if fresh else 1
            for extra in range(n):
                count = len(sequence.tokens) - sequence.num_prompt
                rows.append(
                    Row(
                        sequence.request.sampling,
                        sequence.choice + extra,
                        sequence.tokens,
                        sequence.num_prompt,
                        forbidden(count, sequence.request.sampling, eos),
                    )
                )
                owners.append(sequence)
                source.append(index)
        if not rows:
            return
        picked = sample(logits[source], rows)
        by_owner: dict[int, list[TokenOutput]] = {}
        for owner, row, token in zip(owners, rows, picked, strict=True):
            params = owner.request.sampling
            reason = finish_reason(
                token.token_id,
                len(owner.tokens) - owner.num_prompt + 1,
                len(owner.tokens) + 1,
                params,
                eos,
                self._max_len,
            )
            out = TokenOutput(
                owner.request.request_id,
                row.choice,
                len(owner.tokens),
                token.token_id,
                token.logprob,
                token.top,
                reason,
            )
            output.tokens.append(out)
            by_owner.setdefault(id(owner), []).append(out)
            self._count["output"] += 1
        for owner in {id(o): o for o in owners}.values():
            self._took(owner, by_owner[id(owner)], output)

    def _took(self, sequence: Sequence, tokens: list[TokenOutput], output: StepOutput) -> None:
        request_id = sequence.request.request_id
        if sequence.request.prefill_only:
            self._running.remove(sequence)
            sequence.machine.to(S.HELD)
            output.done.append(self._done([sequence]))
            return
        self._fork(sequence, tokens)
        family = self._requests[request_id]
        if all(s.state is S.FINISHED for s in family):
            del self._requests[request_id]
            output.done.append(self._done(family))

    def _done(self, family: list[Sequence], preempted: bool = False) -> RequestDone:
        first = family[0]
        return RequestDone(
            first.request.request_id,
            preempted,
            min(first.cached_tokens, first.num_prompt),
            first.computed_prompt_tokens,
        )

    # --- facts ------------------------------------------------------------------------------------------

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._page)

    def held_chains(self) -> Iterator[ChainReport]:
        for chain in self._pool.chains():
            yield ChainReport(chain, len(chain))

    def stats(self) -> EngineStats:
        everyone = [s for family in self._requests.values() for s in family]
        return EngineStats(
            steps=self.steps,
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_for_kv=sum(s.state is S.WAITING_FOR_KV for s in everyone),
            waiting_prefill_tokens=sum(s.missing for s in self._waiting)
            + sum(s.missing for s in self._running if s.missing > 1),
            resident_tokens=sum(s.num_computed for s in self._running),
            blocks_total=self._pool.total,
            blocks_free=self._pool.free,
            blocks_held=self._pool.total - self._pool.free,
            prompt_tokens_computed=self._count["computed"],
            prompt_tokens_cached=self._count["cached"],
            output_tokens=self._count["output"],
            prefill_chunks=self._count["chunks"],
            preemptions=self._count["preemptions"],
            prefill_seconds=self._seconds["prefill"],
            decode_seconds=self._seconds["decode"],
        )

    def check_integrity(self) -> None:
        self._pool.check_integrity()
        if not self._requests:
            assert self._pool.free == self._pool.total, "blocks are held and nobody has them"
