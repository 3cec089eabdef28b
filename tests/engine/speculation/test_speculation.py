"""Speculation: streams, ends, reports and blocks are those without it, and fewer steps compute them."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from cluster.config.worker import EngineConfig, WorkerConfig
from cluster.errors import ConfigError
from engine.build import load_model
from engine.engine import Engine
from engine.plan import PlanItem, StepPlan
from engine.request import EngineRequest, FinishReason, SamplingParams
from engine.runner import ModelRunner
from engine.speculation import drafts
from engine.speculation.drafts import LONGEST_PAUSE, DraftState
from engine.speculation.per_sequence import PerSequence, Searches
from tests.engine.fake_model import CONTEXT, continuation, greedy
from tests.engine.ranks import KV_BYTES, engine_of, run
from tests.engine.served import serve
from tests.engine.speculation.proposers import Right, Wrong, ends_of, engine_with
from tests.harness.checkpoints import prompt_ids


class MostlyRight:
    def propose(self, tokens: list[int], count: int) -> list[int]:
        rng = random.Random(len(tokens) * 100 + tokens[-1])
        return [token if rng.random() < 0.7 else 3 for token in continuation(tokens, count)]


class Empty:
    def propose(self, tokens: list[int], count: int) -> list[int]:
        return []


class Seen:
    """Proposes the answers that it has seen, with an error at each fifth position."""

    def __init__(self, streams: list[list[int]]):
        self._streams = streams

    def propose(self, tokens: list[int], count: int) -> list[int]:
        end = len(tokens)
        known = next((one for one in self._streams if one[:end] == tokens), [])
        return [5 if at % 5 == 0 else token for at, token in enumerate(known[end : end + count], end)]


# --- the same streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "device"), [(0, False), (1, True), (2, False), (3, True)])
def test_streams_are_the_same(seed, device, monkeypatch):
    """Stop tokens, limits, choices, penalties, logprobs; requests come at any time."""
    monkeypatch.setattr(drafts, "MAX_ROWS", 64)
    plain, _, _ = serve("off", seed, device=device)
    drafted, _, engine = serve("off", seed, device=device, speculation="ngram", proposer=MostlyRight)
    assert drafted.tokens == plain.tokens and drafted.errors == plain.errors
    assert drafted.chains == plain.chains
    stats = engine.stats()
    assert 0 < stats.draft_tokens_accepted < stats.draft_tokens


@pytest.mark.parametrize("seed", range(2))
def test_streams_are_the_same_where_blocks_are_short(seed):
    """Sequences are preempted and computed again; drafts take no block from another."""
    plain, _, _ = serve("off", seed, blocks=18, max_batch_tokens=16)
    drafted, _, engine = serve(
        "off", seed, blocks=18, max_batch_tokens=16, speculation="ngram", proposer=MostlyRight
    )
    assert drafted.streams() == plain.streams()
    assert engine.stats().draft_tokens_accepted > 0 < engine.stats().preemptions


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_real_models_tokens_are_those_without_drafts(checkpoint, dtype):
    """Greedy and sampled, with penalties, choices and logprobs. The proposer has seen the answers, and errs at each fifth
    token."""
    part = prompt_ids(24, seed=5)
    requests = [
        EngineRequest("greedy", part * 3, greedy(60)),
        EngineRequest("prompt", prompt_ids(40, seed=1) + part, greedy(60, logprobs=True, top_logprobs=2)),
        EngineRequest("choices", part * 2, SamplingParams(0.3, seed=2, max_tokens=40, ignore_eos=True), n=2),
        EngineRequest("penalty", part * 2, greedy(40, repetition_penalty=1.1, presence_penalty=0.2)),
    ]
    plain, engine = (
        engine_of(
            ModelRunner(
                load_model(
                    EngineConfig(
                        model=checkpoint("llama"), dtype=dtype, kv_memory_bytes=KV_BYTES, speculation=way
                    )
                )
            )
        )
        for way in ("none", "ngram")
    )
    for one in requests:
        expected = run(plain, one).tokens
        streams = [[*one.prompt_tokens, *tokens] for tokens in expected.values()]
        engine._drafter.method = PerSequence(partial(Seen, streams))
        assert run(engine, one).tokens == expected, one.request_id
    assert engine.stats().draft_tokens_accepted > 100 and engine.steps < plain.steps - 80


def test_an_end_inside_accepted_drafts_ends_the_choice():
    expected = continuation([5] * 6, 8)
    stop = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=(expected[-1],))
    engine = engine_with(Right)
    tokens = ends_of(engine, EngineRequest("r", [5] * 6, stop))
    assert [one.token_id for one in tokens] == expected
    assert [one.finish for one in tokens] == [None] * 7 + [FinishReason.STOP]
    assert (engine.stats().draft_tokens, engine.stats().draft_tokens_accepted) == (2 + 4, 2 + 3)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 11])
def test_no_draft_goes_beyond_max_tokens(count):
    engine = engine_with(Right)
    tokens = ends_of(engine, EngineRequest("r", [5] * 6, greedy(count)))
    assert [one.token_id for one in tokens] == continuation([5] * 6, count)
    assert engine.stats().draft_tokens == engine.stats().draft_tokens_accepted <= max(0, count - 2)


def test_no_draft_goes_beyond_the_context():
    engine = engine_with(Right)
    tokens = ends_of(engine, EngineRequest("r", [5] * 6, greedy(500)))
    assert len(tokens) == CONTEXT - 6 and tokens[-1].finish is FinishReason.LENGTH
    assert engine.stats().draft_tokens == engine.stats().draft_tokens_accepted > 30


def answered_beside_sick(engine: Engine) -> list[int]:
    """Tokens of the request "well", until it has ended; "sick" fails before it."""
    got, failed = [], []
    while engine.has_work:
        output = engine.step()
        engine.check_integrity()
        got += [one.token_id for one in output.tokens if one.request_id == "well"]
        failed += [(one.request_id, one.error is not None) for one in output.done]
    assert failed == [("sick", True), ("well", False)]
    return got


def test_logits_that_are_no_numbers_end_their_request_only():
    engine = engine_with(Right)
    for name, letter in (("sick", 5), ("well", 6)):
        engine.add(EngineRequest(name, [letter] * 6, greedy(30)))
    engine.step()
    engine._runner.sick.add("sick")  # type: ignore[attr-defined]
    assert answered_beside_sick(engine) == continuation([6] * 6, 30)[1:] and engine.stats().blocks_held == 0


def test_a_failure_among_accepted_drafts_ends_its_request_only(monkeypatch):
    """With all its choices, which cache what they have computed one after the other."""
    engine = engine_with(Right)
    engine.add(EngineRequest("sick", [5] * 6, greedy(30), n=2))
    engine.add(EngineRequest("well", [6] * 6, greedy(30)))
    got = [one.token_id for one in engine.step().tokens if one.request_id == "well"]
    register = engine._outputs._prefixes.register

    def failing(sequence: Any, tokens: int) -> None:
        if sequence.request.request_id == "sick" and tokens > 7:
            raise RuntimeError("x")
        register(sequence, tokens)

    monkeypatch.setattr(engine._outputs._prefixes, "register", failing)
    got += answered_beside_sick(engine)
    assert got == continuation([6] * 6, 30) and engine.stats().blocks_held == 0


# --- how many --------------------------------------------------------------------------------------------


def test_useless_drafts_become_rare():
    engine = engine_with(Wrong, blocks=400)
    engine._max_len = engine._drafter._max_len = 4000
    request = EngineRequest("r", [5] * 6, greedy(50))
    assert len(ends_of(engine, request)) == 50
    assert engine.stats().draft_tokens_accepted == 0 < engine.stats().draft_tokens <= 8


def test_counts_grow_with_success_and_pauses_with_failure():
    state = DraftState()
    state.record(10, drafted=2, accepted=2, most=4)
    assert state.count == 4
    state.record(15, drafted=4, accepted=4, most=4)
    assert state.count == 4
    state.record(20, drafted=4, accepted=1, most=4)
    assert state.count == 2 and state.resume_at <= 20
    pauses = []
    for _ in range(10):
        state.record(100, drafted=1, accepted=0, most=4)
        pauses.append(state.resume_at - 100)
    assert pauses[:3] == [2, 4, 8] and pauses[-1] == LONGEST_PAUSE and state.count == 1
    state.record(100, drafted=1, accepted=1, most=4)
    assert state.failures == 0 and state.count == 2


def test_searches_that_find_nothing_become_rare():
    """The first two cost no pause: a text that quotes goes on with few words of its own."""
    calls = list[int]()

    class Counted(Empty):
        def propose(self, tokens: list[int], count: int) -> list[int]:
            calls.append(len(tokens))
            return super().propose(tokens, count)

    searches = Searches(Counted())
    for length in range(100):
        assert searches.propose([1] * length, 4) == []
    assert calls == [0, 1, 2, 4, 7, 12, 21, 38, 55, 72, 89]
    searches.proposer = Wrong()
    assert searches.propose([1] * 200, 1) == [1] and searches.empty == 0


def test_drafts_are_for_steps_of_few_single_tokens():
    """None where each sequence could have less than one."""
    engine = engine_with(Right, blocks=400)
    rows = drafts.MAX_ROWS
    for index in range(rows // 2 + 1):
        engine.add(EngineRequest(f"r{index}", [5 + index] * 6, greedy(40)))
    for _ in range(6):
        engine.step()
    assert engine.stats().draft_tokens == 0
    engine.abort("r0")
    engine.step()
    assert engine.stats().draft_tokens == rows // 2


def test_a_step_with_a_prompt_has_no_drafts():
    engine = engine_with(Right, blocks=400)
    engine.add(EngineRequest("running", [5] * 6, greedy(40)))
    for _ in range(2):
        engine.step()
    before = engine.stats().draft_tokens
    engine.add(EngineRequest("late", [3] * 9, greedy(4)))
    engine.step()
    assert [len(item.token_ids) for item in engine.step_items] == [1, 9]
    assert engine.stats().draft_tokens == before == 2
    engine.step()
    assert engine.stats().draft_tokens > before


def test_drafts_of_long_contexts_do_not_slow_others(monkeypatch):
    """Alone, a sequence pays for its drafts itself."""
    monkeypatch.setattr(drafts, "MAX_ATTENDED", 1)
    engine = engine_with(Right, blocks=400)
    engine.add(EngineRequest("short", [6] * 2, greedy(40)))
    engine.add(EngineRequest("long", [5] * 30, greedy(30)))
    for _ in range(5):
        engine.step()
        assert all(item.request_id == "short" for item in engine.step_items[2:])
    assert engine.stats().draft_tokens > 0
    engine.abort("short")
    engine.step()
    assert len(engine.step_items) > 1 and engine.step_items[-1].request_id == "long"


@pytest.mark.parametrize("field", ["max_batch_requests", "max_batch_tokens"])
def test_a_step_without_room_for_drafts_is_refused(field):
    with pytest.raises(ValidationError, match=f"{field} 1 leaves a step no room for drafts"):
        EngineConfig(model=Path("/none"), speculation="ngram", **{field: 1})


@pytest.mark.parametrize(
    ("role", "settings", "flag"),
    [
        ("decode", {"speculative_tokens": 6}, "--speculative-tokens 6 has no effect"),
        ("prefill", {"speculation": "ngram"}, "--speculation ngram has no effect on a prefill worker"),
    ],
)
def test_settings_without_an_effect_are_refused(role, settings, flag):
    with pytest.raises(ConfigError, match=flag) as caught:
        WorkerConfig(role=role, engine={"model": "/none", **settings})
    assert caught.value.field == next(iter(settings))


def test_it_excludes_steps_launched_ahead():
    with pytest.raises(ValidationError, match="overlap on launches a step before"):
        EngineConfig(model=Path("/none"), overlap="on", speculation="ngram")


def test_no_step_is_launched_ahead(monkeypatch):
    """Not on a card either, where overlap auto would."""
    monkeypatch.setattr("engine.engine.overlaps", lambda *_: True)
    engine = engine_with(Right)
    tokens = ends_of(engine, EngineRequest("r", [5] * 6, greedy(20)))
    assert [one.token_id for one in tokens] == continuation([5] * 6, 20)
    assert engine._runner.ahead == 0 < engine.stats().draft_tokens_accepted  # type: ignore[attr-defined]


def test_drafts_are_single_tokens_in_their_sequences_row(checkpoint, monkeypatch):
    """So the kernels for single tokens compute them, bit for bit as in steps of their own."""
    settings = EngineConfig(
        model=checkpoint("llama"), dtype="bfloat16", kv_memory_bytes=KV_BYTES, speculation="ngram"
    )
    runner = ModelRunner(load_model(settings))
    engine = engine_of(runner)
    engine._drafter.method = PerSequence(Wrong)
    plans: list[Any] = []
    execute = runner.execute

    def seen(plan: Any, drawn: Any = None) -> Any:
        plans.append(plan)
        return execute(plan, drawn)

    monkeypatch.setattr(runner, "execute", seen)
    run(engine, EngineRequest("r", prompt_ids(24, seed=5) * 3, greedy(60)))
    shared = [plan for plan in plans if len({item.row for item in plan.items}) < len(plan.items)]
    assert len(shared) > 3
    for plan in shared:
        assert all(len(item.token_ids) == item.num_logits == 1 for item in plan.items)
        assert [item.begin for item in plan.items] == list(
            range(plan.items[0].begin, plan.items[0].begin + len(plan.items))
        )


@pytest.mark.parametrize("count", [2, 5, 16])
def test_logits_of_drafts_are_those_of_steps_of_their_own(checkpoint, count):
    """To the last bit, with our own products."""
    settings = EngineConfig(model=checkpoint("llama"), dtype="bfloat16", kv_memory_bytes=KV_BYTES)
    runner = ModelRunner(load_model(settings))
    tokens, blocks = prompt_ids(20 + count, seed=5), list(range(8))
    prompt = StepPlan([PlanItem("r", tokens[:20], 0, blocks, 0, 0)], [])
    drafts = [PlanItem("r", [tokens[at]], at, blocks, 0, 1) for at in range(20, 20 + count)]
    for plan in (prompt, *(StepPlan([one], []) for one in drafts)):
        runner.execute(plan)  # keys and values; what is compiled
    alone = torch.cat([runner.execute(StepPlan([one], [])) for one in drafts])
    for at in range(20, 20 + count):
        block, within = divmod(at, runner.page_size)
        runner.kv_cache[blocks[block], ..., within, :] = 7.0
    assert torch.equal(runner.execute(StepPlan(drafts, [])), alone)
