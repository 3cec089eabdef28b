"""Streams of engines that speculate with a draft model, and the bounds of its work and its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.build import load_model
from engine.engine import Engine
from engine.plan import StepPlan
from engine.request import EngineRequest, SamplingParams, TokenOutput
from engine.runner import ModelRunner
from engine.scheduler.sequence import Sequence, SequenceState
from engine.speculation import draft_model, drafts, load_draft
from engine.speculation.draft_cache import DraftCache
from engine.speculation.draft_gate import DraftGate
from engine.speculation.draft_model import DraftModel
from tests.engine.fake_model import CONTEXT, PAGE, VOCAB, FakeRunner, continuation, greedy, next_token
from tests.engine.ranks import engine_of, run, runners
from tests.engine.served import serve
from tests.engine.speculation.draft_engines import DRAFT, Observed, answers, drafting, settings_for, steps
from tests.harness.checkpoints import prompt_ids


class Other(Observed):
    """A model whose tokens are never the target's."""

    def execute(self, plan: StepPlan, drawn: Tensor | None = None) -> Tensor:
        return super().execute(plan, drawn).roll(1, -1)


class Smaller(Observed):
    VOCAB = 90

    def __init__(self) -> None:
        super().__init__()
        self.model_config = replace(self.model_config, vocab_size=self.VOCAB)

    def row(self, tokens: list[int]) -> Tensor:
        row = torch.zeros(VOCAB)
        row[next_token(tokens)] = 1.0
        return row[: self.VOCAB]


def cache_of(engine: Engine) -> DraftCache:
    assert isinstance(engine._drafter.method, DraftModel)
    return engine._drafter.method.cache


# --- streams ---------------------------------------------------------------------------------------------


def test_every_draft_of_the_same_model_is_accepted():
    """Of several requests at a time, which are drafted together."""
    draft = Observed()
    engine = drafting(draft)
    prompts = {f"r{length}": [5 + length] * length for length in (1, 6, 17)}
    for name, prompt in prompts.items():
        engine.add(EngineRequest(name, prompt, greedy(40)))
    got = answers(engine)
    assert got == {name: continuation(prompt, 40) for name, prompt in prompts.items()}
    stats = engine.stats()
    assert stats.draft_tokens_accepted == stats.draft_tokens > 80 and stats.draft_failures == 0
    assert 1 + stats.draft_tokens_accepted / stats.draft_steps > 3
    assert max(len({item.row for item in plan.items}) for plan in draft.plans) == 3


@pytest.mark.parametrize(("seed", "blocks"), [(0, 400), (1, 400), (2, 18), (3, 18)])
def test_streams_are_those_without_drafts(seed, blocks, monkeypatch):
    """Penalties, stops, choices, logprobs, aborts of none; with 18 blocks sequences are preempted. The draft model's pool
    is too small for all."""
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 20)
    monkeypatch.setattr(drafts, "MAX_ROWS", 64)
    tokens: dict[str, Any] = {"max_batch_tokens": 16} if blocks < 100 else {}
    plain, _, _ = serve("off", seed, blocks=blocks, **tokens)
    drafted, _, engine = serve("off", seed, blocks=blocks, draft=FakeRunner(150), draft_model=DRAFT, **tokens)
    assert drafted.streams() == plain.streams() and drafted.errors == plain.errors
    stats = engine.stats()
    assert stats.draft_tokens_accepted > 0 == stats.draft_failures
    cache_of(engine).check_integrity()


def test_a_model_of_another_mind_gets_few_drafts():
    engine = drafting(Other(), blocks=400)
    engine.add(EngineRequest("r", [5] * 6, greedy(50)))
    assert answers(engine) == {"r": continuation([5] * 6, 50)}
    assert engine.stats().draft_tokens_accepted == 0 < engine.stats().draft_tokens <= 8


def test_a_request_that_was_handed_over_gets_drafts():
    """Only its KV for the target arrives: the draft model computes its own."""
    prompt, engine = [7] * 21, drafting(Observed())
    request = EngineRequest("r", prompt, greedy(30))
    reservation = engine.reserve(request, [], 16)
    engine._runner.store(reservation.block_ids, 0, prompt)  # type: ignore[attr-defined]
    expected = continuation(prompt, 30)
    engine.commit("r", [TokenOutput("r", 0, len(prompt), expected[0])])
    assert answers(engine) == {"r": expected[1:]}
    assert engine.stats().draft_tokens_accepted == engine.stats().draft_tokens > 20


# --- bounds ----------------------------------------------------------------------------------------------


def test_a_step_computes_a_bounded_part_of_what_is_missing(monkeypatch):
    """A prompt has no drafts until it has been caught up with."""
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 8)
    draft = Observed()
    engine = drafting(draft)
    engine.add(EngineRequest("long", [5] * 30, greedy(20)))
    engine.add(EngineRequest("short", [6] * 3, greedy(20)))
    caught_up, drafted = list[int](), list[int]()
    for _ in steps(engine):
        sizes = [sum(len(item.token_ids) for item in plan.items) for plan in draft.plans]
        chunks = [one for plan, one in zip(draft.plans, sizes, strict=True) if not plan.items[0].num_logits]
        assert len(chunks) <= 1
        caught_up.append(sum(chunks))
        drafted.append(engine.stats().draft_tokens)
        draft.plans.clear()
    assert caught_up[:6] == [0, 8, 8, 8, 8, caught_up[5]] and not any(caught_up[6:])
    assert drafted[1] > 0, "the short one does not wait for the long one"
    assert engine.stats().draft_tokens_accepted == engine.stats().draft_tokens > 10


def test_a_chunk_attends_to_a_bounded_number_of_tokens(monkeypatch):
    """The longer the context before it, the smaller it is."""
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 8)
    monkeypatch.setattr(draft_model, "CATCH_UP_ATTENDED", 60)
    monkeypatch.setattr(draft_model, "MIN_CHUNK", 2)
    draft = Observed()
    engine = drafting(draft)
    engine.add(EngineRequest("r", [5] * 24, greedy(30)))
    assert answers(engine) == {"r": continuation([5] * 24, 30)}
    chunks = [len(plan.items[0].token_ids) for plan in draft.plans if not plan.items[0].num_logits]
    assert chunks[:7] == [8, 6, 4, 3, 2, 2, 2]


def test_chunks_of_several_sequences_share_what_may_be_attended_to(monkeypatch):
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 8)
    monkeypatch.setattr(draft_model, "CATCH_UP_ATTENDED", 60)
    monkeypatch.setattr(draft_model, "MIN_CHUNK", 2)
    draft = Observed()
    engine = drafting(draft)
    for name in ("a", "b"):
        engine.add(EngineRequest(name, [5] * 24, greedy(30)))
    answers(engine)
    chunks = [plan.items for plan in draft.plans if not plan.items[0].num_logits]
    for items in chunks:
        attended = sum(len(item.token_ids) * (item.end - len(item.token_ids) + 1) for item in items)
        assert attended <= 60 or (len(items) == 1 and len(items[0].token_ids) == 2)


def test_drafts_end_where_the_draft_models_context_or_pool_does():
    for draft, most in ((Observed(4), 4 * PAGE), (Observed(), 20)):
        draft.config = draft.config.model_copy(update={"max_model_len": most})
        engine = drafting(draft)
        engine.add(EngineRequest("r", [5] * 6, greedy(40)))
        assert answers(engine) == {"r": continuation([5] * 6, 40)}
        assert 5 < engine.stats().draft_tokens <= most
        assert max(item.end for plan in draft.plans for item in plan.items) <= most


def test_a_draft_model_never_gets_a_token_that_it_lacks():
    """A request with such a token, in its prompt or later, has no drafts; others do."""
    draft = Smaller()
    engine = drafting(draft, blocks=400)
    for name, prompt in (("lacks", [5, 95, 5]), ("has", [6] * 7)):
        engine.add(EngineRequest(name, prompt, greedy(20)))
    expected = {"lacks": continuation([5, 95, 5], 20), "has": continuation([6] * 7, 20)}
    assert answers(engine) == expected
    given = [item for plan in draft.plans for item in plan.items]
    assert all(token < Smaller.VOCAB for item in given for token in item.token_ids)
    assert {item.request_id for item in given} == {"has"}
    assert engine.stats().draft_failures == 0 < engine.stats().draft_tokens


@pytest.mark.parametrize("blocks", [3, 4, 5])
def test_no_draft_is_computed_that_has_no_room(blocks):
    """A gate that lets all through shows that drafts cost time."""
    engine = drafting(Observed(), blocks)
    engine._drafter.gate = OpenGate()
    engine.add(EngineRequest("one", [5] * (2 * PAGE), greedy(blocks * PAGE - 2 * PAGE - 1)))
    method, computed = engine._drafter.method, list[int]()
    assert method is not None
    propose = method.propose

    def counted(asked: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        found = propose(asked)
        computed.append(sum(len(drafts) for drafts in found.values()))
        return found

    method.propose = counted  # type: ignore[method-assign]
    answers(engine)
    assert all(computed) and sum(computed) == engine.stats().draft_tokens > 0


class OpenGate(DraftGate):
    def allows(self, sequences: int) -> bool:
        return True


def sequence(name: str, tokens: int) -> Sequence:
    request = EngineRequest(name, [5] * tokens, greedy(40))
    return Sequence(request, 0, [5] * tokens, 0, SequenceState.RUNNING)


def test_the_least_recently_used_sequence_is_dropped():
    cache, (a, b, c) = DraftCache(6, PAGE, 8), (sequence(name, 8) for name in "abc")
    for one in (a, b, a):
        assert cache.hold(one, 2 * PAGE, {one}) is not None
    held = cache.hold(c, 3 * PAGE, {c})
    cache.check_integrity()
    assert held is not None and len(held.blocks) == 3 and len(cache) == 2
    found = cache.hold(a, 2 * PAGE, {a, c})
    assert found is not None and len(found.blocks) == 2 and len(cache) == 2, "it was b that was dropped"
    assert cache.hold(b, 2 * PAGE, {a, b, c}) is None, "both others get drafts in the same step"
    assert cache.hold(a, 4 * PAGE, {a, c}) is None and len(cache) == 1, "no part of a sequence is kept"
    cache.check_integrity()


def test_rows_are_bounded_too():
    cache, (a, b) = DraftCache(6, PAGE, 1), (sequence(name, 4) for name in "ab")
    assert cache.hold(a, PAGE, {a}) and cache.hold(b, PAGE, {a, b}) is None
    assert cache.hold(b, PAGE, {b}) and len(cache) == 1
    cache.check_integrity()


def test_kv_of_rejected_drafts_is_computed_again():
    cache, one = DraftCache(6, PAGE, 1), sequence("a", 4)
    held = cache.hold(one, PAGE, {one})
    assert held is not None
    held.length, held.drafted = 4, [8, 3, 7]
    one.tokens += [8, 9, 7]
    assert cache.hold(one, 2 * PAGE, {one}) is held and (held.length, held.drafted) == (5, [])
    held.drafted = [9, 7, 7]
    one.tokens += [7]
    cache.hold(one, 2 * PAGE, {one})
    assert held.length == 7, "the last token is computed again: the next is drafted from it"


def test_stopped_sequences_are_dropped():
    """At the next drafts: nothing tells the draft model earlier."""
    engine = drafting(Observed())
    for name in ("a", "b"):
        engine.add(EngineRequest(name, [5] * 6, greedy(20)))
    engine.step(), engine.step()
    assert len(cache_of(engine)) == 2
    engine.abort("a")
    engine.step()
    assert len(cache_of(engine)) == 1
    cache_of(engine).check_integrity()


# --- real models -----------------------------------------------------------------------------------------


def some_requests() -> list[EngineRequest]:
    part = prompt_ids(24, seed=5)
    return [
        EngineRequest("greedy", part * 6, greedy(60)),
        EngineRequest("stop", part, SamplingParams(0.0, max_tokens=40, stop_token_ids=(9, 11, 40))),
        EngineRequest("choices", part * 2, SamplingParams(0.3, seed=2, max_tokens=40, ignore_eos=True), n=2),
        EngineRequest("penalty", part * 2, greedy(40, repetition_penalty=1.1, presence_penalty=0.2)),
    ]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "least"), [("llama", 0.6), ("llama-mha", 0.0)])
def test_a_real_models_tokens_are_those_without_drafts(checkpoint, dtype, name, least):
    """The draft model is the target itself, or another random one."""
    model = checkpoint("llama")
    config = settings_for(model, checkpoint(name), dtype)
    draft = load_draft.load(config)
    plain = engine_of(ModelRunner(load_model(settings_for(model, None, dtype))))
    runner = ModelRunner(load_model(config))
    engine = Engine(runner, runner.config, secret=b"test", draft=draft)
    engine._drafter.gate = None
    for one in some_requests():
        assert run(engine, one).tokens == run(plain, one).tokens, one.request_id
    stats = engine.stats()
    assert stats.draft_failures == 0 < stats.draft_tokens
    assert stats.draft_tokens_accepted >= least * stats.draft_tokens
    assert least == 0.0 or engine.steps < 0.6 * plain.steps


@pytest.mark.long
def test_ranks_get_the_same_drafts(checkpoint):
    """The draft model runs beside the leader; others get drafts with the plan."""
    model = checkpoint("llama")
    config = settings_for(model, model, "float32")
    draft = load_draft.load(config)
    plain = engine_of(ModelRunner(load_model(settings_for(model, None, "float32"))))
    with runners(model, 2, max_model_len=256, draft_model=model) as (leader, _):
        engine = Engine(leader, leader.config, secret=b"test", draft=draft)
        engine._drafter.gate = None
        for one in some_requests():
            assert run(engine, one).tokens == run(plain, one).tokens, one.request_id
    assert engine.stats().draft_tokens_accepted > 50


def test_the_fake_models_context_is_as_long_as_these_tests_need():
    assert CONTEXT >= 60
