"""The engine: requests in, tokens out, one step at a time.

    step:  scheduler decides ─► runner computes ─► output processor draws tokens, ends requests

With overlap the next step is launched before the host reads the tokens of the last one (engine/flight.py).

Every method is called on one thread, except `stats`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import BlocksExhaustedError, ContextLengthError, InvalidRequestError, engine_request_error
from cluster.telemetry.metrics import worker as metrics
from engine.cache.block_pool import BlockPool
from engine.compiled_grammar import CompiledGrammar
from engine.flight import Flight, predictable
from engine.grammar_masks import GrammarMasks
from engine.lora.loaded import AdapterRunner, LoadedAdapters
from engine.model.config import ModelConfig
from engine.next_tokens import StopLimits
from engine.output import OutputProcessor, StepSpan, request_done
from engine.plan import PlanItem, StepPlan
from engine.prompt_scores import Scores
from engine.request import (
    ChainReport,
    EngineRequest,
    EngineReservation,
    EngineStats,
    RequestDone,
    StepOutput,
    TokenOutput,
)
from engine.sampling.grammar.registry import backend_for
from engine.sampling.grammar.store import Grammars
from engine.sampling.registry import sampler_for
from engine.scheduler.aging import Clock
from engine.scheduler.decision import StepDecision
from engine.scheduler.prefix_cache import PrefixCache
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S
from engine.speculation.draft_model import DraftRunner
from engine.speculation.drafts import Drafter
from engine.speculation.registry import method_for


class StepTimes:
    """Histograms of steps: duration, tokens, sequences. Written by one thread, read by any."""

    def __init__(self) -> None:
        self.total_seconds = {"prefill": 0.0, "decode": 0.0}
        self.seconds = {kind: metrics.ENGINE_STEP_SECONDS.create() for kind in self.total_seconds}
        self.tokens = metrics.ENGINE_STEP_TOKENS.create()
        self.requests = metrics.ENGINE_STEP_REQUESTS.create()

    def add(self, tokens: int, sequences: int, seconds: float) -> None:
        """Record a step. One with more tokens than sequences contains a prompt."""
        kind: Literal["prefill", "decode"] = "prefill" if tokens > sequences else "decode"
        self.total_seconds[kind] += seconds
        self.seconds[kind].observe(seconds)
        self.tokens.observe(tokens)
        self.requests.observe(sequences)


class Runner(Protocol):
    model_config: ModelConfig
    num_blocks: int
    page_size: int
    config: EngineConfig
    device: torch.device
    num_ranks: int

    @property
    def adapters(self) -> AdapterRunner: ...

    def execute(self, plan: StepPlan, drawn: Tensor | None = None) -> Tensor:
        """Logits, valid until the next step; for `drawn` see StepBuffers.load."""
        ...

    def take_scores(self) -> list[Scores]:
        """Take the scores of the scored items of the last step, in order."""
        ...

    def take_pooled(self) -> list[Tensor]:
        """Take the vectors of the pooled items of the last step, in order: float32 [hidden]."""
        ...


def overlaps(asked: str, device: torch.device, ranks: int) -> bool:
    """Whether steps are launched ahead. Other ranks would need the tokens, which the leader draws."""
    return ranks == 1 and (asked == "on" or (asked == "auto" and device.type == "cuda"))


class Engine:
    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        secret: bytes,
        on_chain: Callable[[ChainReport], None] = lambda report: None,
        clock: Clock = time.monotonic,
        draft: DraftRunner | None = None,
        grammars: Grammars | None = None,
    ):
        """`draft`: the runner of the draft model, if the settings name one. `grammars`: the store of compiled grammars."""
        self._clock = clock
        self._runner = runner
        self._max_len = config.max_model_len or runner.model_config.max_model_len
        self._pool = BlockPool(runner.num_blocks, lambda chain, held: on_chain(ChainReport(chain, held)))
        prefixes = PrefixCache(
            self._pool, runner.page_size, on_chain, secret=secret, enabled=config.prefix_caching
        )
        limits = StopLimits(runner.model_config.eos_token_ids, self._max_len)
        self.adapters = LoadedAdapters(runner.adapters)
        self._counters = EngineStats()  # its gauges are set by `stats` only
        self._scheduler = Scheduler(config, self._pool, prefixes, clock)
        sampler = sampler_for(runner.device)
        method = method_for(config, draft)
        self._drafter = Drafter(config, self._scheduler.spare, self._pool, self._max_len, method)
        vocab = runner.model_config.vocab_size
        if grammars is None:
            grammars = Grammars(backend_for(Path(config.model), vocab, limits.eos))
        self.grammars = grammars
        self._masks = GrammarMasks(self.grammars, vocab)
        self._outputs = OutputProcessor(
            self._scheduler, prefixes, limits, self._counters, sampler, self._drafter, self._masks
        )
        self._overlap = config.draft_source is None and overlaps(
            config.overlap, runner.device, runner.num_ranks
        )
        self._flight: Flight | None = None
        self._collected_at = 0.0
        self._step_seconds = 0.0  # of the last step
        self.steps = 0
        # Of the last step, and of the one launched ahead of its results; empty while one is scheduled.
        self.step_items: list[PlanItem] = []
        self.step_times = StepTimes()

    # --- requests --------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        self._check(request)
        self._scheduler.add(request)

    def _check(self, request: EngineRequest) -> None:
        self.adapters.check(request.adapter)
        self._masks.active |= request.grammar is not None
        length = len(request.prompt_tokens) + len(request.output_tokens)
        if request.request_id in self._scheduler.requests:
            raise InvalidRequestError(
                f"request {request.request_id} is already in the engine", field="request_id"
            )
        if not request.prompt_tokens:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        if length >= self._max_len or self._scheduler.blocks_for(length) > self._pool.total:
            limit = str(self._max_len)
            what = f"{length} tokens do not fit a context of {limit}"
            raise ContextLengthError(what, field="prompt", limit=limit)

    def abort(self, request_id: str, verified_tokens: int = 0) -> RequestDone | None:
        """Free the request's blocks. Of a reservation's KV the first `verified_tokens` tokens stay cached. Returns what
        was cached and computed of its prompt; None if there is no such request."""
        choices = self._scheduler.requests.get(request_id)
        if choices is None:
            return None
        self._scheduler.remove(request_id, verified_tokens)
        if self._flight is not None:
            self._flight.hold_left(self._pool, self._runner.page_size)  # until the next call of `step`
        return request_done(choices)

    def park(self, request_id: str) -> None:
        """Stop computing the request but keep its blocks until `abort`: hand-off writes may still read them."""
        self._scheduler.park(request_id)

    def pause(self, request_id: str) -> None:
        self._scheduler.set_paused(request_id, True)

    def resume(self, request_id: str) -> None:
        self._scheduler.set_paused(request_id, False)

    def block_ids(self, request_id: str) -> list[int]:
        return list(self._scheduler.requests[request_id][0].blocks)

    def cached_tokens(self, request_id: str) -> int:
        return self._scheduler.requests[request_id][0].cached_tokens

    def adapter_fits(self, digest: str, held: Collection[str]) -> bool:
        return self.adapters.fits(digest, self._adapters_used(held))

    def write_adapter(self, digest: str, held: Collection[str], lane: int = 0) -> None:
        """Load the adapter that was read. `held`: digests that requests outside the engine have, those that wait for their
        turn or for a hand-off. Raises AdapterSlotsError."""
        self.adapters.write(digest, self._adapters_used(held), lane)

    def _adapters_used(self, held: Collection[str]) -> set[str]:
        return {choices[0].request.adapter for choices in self._scheduler.requests.values()}.union(held)

    # --- hand-off --------------------------------------------------------------------------------------

    def reserve(
        self, request: EngineRequest, block_hashes: Seq[bytes], growth_tokens: int
    ) -> EngineReservation:
        """Allocate blocks for KV that a hand-off will bring, and for `growth_tokens` tokens of each choice."""
        self._check(request)
        length = len(request.prompt_tokens) + len(request.output_tokens)
        hashes = block_hashes[: length // self._runner.page_size]
        sequence = self._scheduler.reserve(request, hashes, min(length + growth_tokens, self._max_len))
        return EngineReservation(sequence.blocks, sequence.cached_tokens)

    def commit(
        self, request_id: str, first_tokens: Seq[TokenOutput], compiled: CompiledGrammar | None = None
    ) -> None:
        """Run a reservation whose KV is complete, from the first token of each choice on. `compiled`: its grammar, if it
        was compiled since the reservation."""
        choices = self._scheduler.requests.get(request_id, ())
        sequence = next((s for s in choices if s.state is S.WAITING_FOR_KV), None)
        if sequence is None:  # evicted before this commit was carried out
            raise BlocksExhaustedError(f"nothing is reserved for {request_id}", retry_after_seconds=0.05)
        if sequence.choice not in {token.choice for token in first_tokens} or all(
            token.finish is not None for token in first_tokens
        ):
            raise InvalidRequestError("first_tokens: none continues the reservation", field="first_tokens")
        if compiled is not None:
            sequence.request = replace(sequence.request, compiled=compiled)
        try:
            self._scheduler.start_reserved(sequence)
            self._outputs.append_tokens(sequence, first_tokens)
        except Exception as error:  # all parts have landed, so no write can still reach its blocks
            self.abort(request_id)
            raise engine_request_error(error) from error

    # --- a step ----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._flight is not None or self._scheduler.has_work

    @property
    def full(self) -> bool:
        """Whether a waiting request of a tenant that has others gets no seat, or no blocks. Any thread."""
        return self._scheduler.batch_full or self._scheduler.short_of_blocks

    def step(self) -> StepOutput:
        """The results of one step."""
        flight, self._flight = self._flight, None
        if flight is None:
            launched = self._launch()
            if isinstance(launched, StepOutput) and launched.is_empty and self._masks.rest():
                launched = self._launch()
            if isinstance(launched, StepOutput):
                return launched
            flight = launched
        if self._may_follow(flight):
            flight.follow()
            following = self._launch(flight)
            if isinstance(following, Flight):
                self._flight = following
            else:
                self.step_items = flight.plan.items
        self._collect(flight)
        return flight.output

    def _launch(self, before: Flight | None = None) -> Flight | StepOutput:
        """Launch a step, perhaps behind one whose tokens have not been read. If nothing can be scheduled, only what
        scheduling has ended is returned."""
        began, self.step_items = self._clock(), []
        if self._masks.active:
            self._masks.begin_step(self._step_seconds)
            self._masks.look(self._scheduler.waiting)
        decision = self._scheduler.schedule()
        counters = self._counters
        counters.prompt_tokens_cached += decision.cached_tokens
        counters.preemptions += decision.preemptions
        counters.reservations_evicted += len(decision.evicted_reservations)
        done = [request_done(choices, preempted=True) for choices in decision.returned]
        output = StepOutput([], done, decision.evicted_reservations, began)
        if not decision.scheduled:
            return output
        self._drafter.draft(decision)
        self._scheduler.rows.assign(decision.scheduled)
        plan = decision.plan(self.adapters.slots)
        self.step_items = plan.items if before is None else plan.items + before.plan.items
        masked = self._prepare_masks(decision) if self._masks.active else []
        logits = self._runner.execute(plan, before.pending.token_ids if before is not None else None)
        for sequence in decision.scheduled:
            sequence.blocks_in_row = len(sequence.blocks)
        left_out = list[tuple[Sequence, PlanItem, int]]()
        if masked:
            plan, logits, left_out = self._leave_out_late(decision, plan, logits, masked)
        scores = self._runner.take_scores() if any(item.scored for item in plan.items) else []
        pooled = self._runner.take_pooled() if any(item.pooled for item in plan.items) else []
        pending = self._outputs.begin(decision, plan, logits)
        return Flight(decision, plan, pending, output, logits, scores, pooled, left_out=left_out)

    def _prepare_masks(self, decision: StepDecision) -> list[Sequence]:
        """Returns the sequences whose next tokens need masks."""
        scheduled = decision.scheduled
        masked = [s for s, count in scheduled.items() if count == s.missing and s.request.grammar is not None]
        if masked:
            self._masks.prepare(masked)
        else:
            choices = self._scheduler.requests.values()
            self._masks.active = any(some[0].request.grammar is not None for some in choices)
        return masked

    def _leave_out_late(
        self, decision: StepDecision, plan: StepPlan, logits: Tensor, masked: Seq[Sequence]
    ) -> tuple[StepPlan, Tensor, list[tuple[Sequence, PlanItem, int]]]:
        """Leave out what waits for its mask: a later step computes that token again. Not those whose KV or scores are
        handed on by then: the masks of prompts are filled before. Returns what the step computes all the same, too."""
        items = dict(decision.own_items(plan))
        late = self._masks.late([one for one in masked if _may_be_left_out(items[one])])
        if not late:
            return plan, logits, []
        left_out = [(one, items[one], len(decision.drafts.get(one, ()))) for one in late]
        plan, rows = decision.leave_out(plan, late)
        return plan, logits[rows], left_out

    def _may_follow(self, flight: Flight) -> bool:
        """Whether the next step may be launched now: scheduling it neither admits, preempts nor evicts."""
        scheduler = self._scheduler
        return (
            self._overlap
            and not scheduler.waiting
            and not self._masks.any_waits  # whose masks are looked for before a step
            and self._pool.num_free >= len(scheduler.running)  # one each, to grow or to copy
            and predictable(flight)
        )

    def _collect(self, flight: Flight) -> None:
        """Wait for the step, and process its tokens."""
        flight.pending.results()
        self.steps += 1
        began, ended = max(flight.output.began, self._collected_at), self._clock()
        following = self._flight
        if following is not None:
            following.discarded |= flight.redrawn()
        self._outputs.finish(flight, StepSpan(began, ended, flight.tokens))
        flight.release(self._pool)
        self._collected_at = self._clock()
        seconds = self._collected_at - began
        self._step_seconds = seconds - self._masks.waited_seconds if self._masks.active else seconds
        self.step_times.add(flight.tokens, len(flight.decision.scheduled), seconds)
        self._drafter.step_ended(flight.decision, seconds, len(flight.output.tokens))
        if following is None:
            return
        following.hold_left(self._pool, self._runner.page_size)
        if not any(following.keeps(sequence) for sequence in following.decision.scheduled):
            self._flight = None
            self._collect(following)  # nothing of it is wanted

    # --- facts -----------------------------------------------------------------------------------------

    def held_chains(self) -> Iterator[ChainReport]:
        for chain in self._pool.chains():
            yield ChainReport(chain, len(chain))

    def stats(self) -> EngineStats:
        """Any thread."""
        running, waiting = list(self._scheduler.running), list(self._scheduler.waiting)
        return replace(
            self._counters,
            steps=self.steps,
            draft_failures=self._drafter.failures,
            running=len(running),
            waiting=len(waiting),
            waiting_for_kv=sum(s.state is S.WAITING_FOR_KV for s in self._scheduler.sequences()),
            waiting_prefill_tokens=sum(s.missing for s in waiting)
            + sum(s.missing for s in running if s.missing > 1),
            resident_tokens=sum(s.num_computed for s in running),
            blocks_total=self._pool.total,
            blocks_free=self._pool.num_free,
            blocks_held=self._pool.total - self._pool.num_free,
            prefill_seconds=self.step_times.total_seconds["prefill"],
            decode_seconds=self.step_times.total_seconds["decode"],
        )

    def check_integrity(self) -> None:
        """Between two steps: every reference on a block is held by a sequence."""
        sequences = self._scheduler.sequences()
        held = self._flight.held if self._flight is not None else {}
        self._pool.check_integrity(Counter([*held, *(block for s in sequences for block in s.blocks)]))
        self._scheduler.rows.check_integrity(sequences)


def _may_be_left_out(item: PlanItem) -> bool:
    return not (item.export or item.scored or item.pooled) and len(item.token_ids) == 1
