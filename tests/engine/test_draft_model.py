"""Speculation with a draft model. The fake model is its own draft: its answer depends on every token that it reads back
from its cache, so each greedy draft is accepted only if the draft model's cache has exactly the sequence's tokens."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from cluster.config.worker import EngineConfig, WorkerConfig
from cluster.errors import ConfigError
from engine import build
from engine.build import load_model
from engine.engine import Engine
from engine.plan import StepPlan
from engine.request import EngineRequest, SamplingParams, TokenOutput
from engine.runner import ModelRunner
from engine.scheduler.sequence import Sequence, SequenceState
from engine.speculation import draft_model, drafts, load_draft, pool_bytes
from engine.speculation.draft_cache import DraftCache
from engine.speculation.draft_gate import DraftGate
from engine.speculation.draft_model import DraftModel
from tests.engine.fake_model import CONTEXT, PAGE, VOCAB, FakeRunner, continuation, next_token
from tests.engine.ranks import KV_BYTES, engine_of, run, runners
from tests.engine.served import serve
from tests.harness.checkpoints import prompt_ids
from worker.ranks import local

DRAFT = Path("/draft")


class Observed(FakeRunner):
    """A draft model that keeps the plans of its steps."""

    def __init__(self, blocks: int = 100):
        super().__init__(blocks)
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan, drawn: Tensor | None = None) -> Tensor:
        self.plans.append(plan)
        return super().execute(plan, drawn)


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


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


def drafting(draft: FakeRunner, blocks: int = 100, **settings: Any) -> Engine:
    runner = FakeRunner(blocks, draft_model=DRAFT, **settings)
    engine = Engine(runner, runner.config, secret=b"s", draft=draft)
    engine._drafter.gate = None  # its drafts take as long as its tokens
    return engine


def cache_of(engine: Engine) -> DraftCache:
    assert isinstance(engine._drafter.method, DraftModel)
    return engine._drafter.method.cache


def steps(engine: Engine) -> Iterator[list[TokenOutput]]:
    """The tokens of each step, until nothing is left."""
    while engine.has_work:
        output = engine.step()
        engine.check_integrity()
        assert all(done.error is None for done in output.done)
        yield output.tokens


def answers(engine: Engine) -> dict[str, list[int]]:
    got = dict[str, list[int]]()
    for tokens in steps(engine):
        for one in tokens:
            got.setdefault(one.request_id, []).append(one.token_id)
    assert engine.stats().blocks_held == 0
    return got


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


# --- whether it pays -------------------------------------------------------------------------------------


class Timed(Observed):
    """Each step takes `seconds`."""

    def __init__(self, now: list[float], seconds: float):
        super().__init__(400)
        self.now, self.seconds = now, seconds

    def execute(self, plan: StepPlan, drawn: Tensor | None = None) -> Tensor:
        self.now[0] += self.seconds
        return super().execute(plan, drawn)


@pytest.mark.parametrize(("seconds", "most"), [(0.1, 1000), (2.0, 4 * (16 + 1) + 4)])
def test_a_draft_model_that_takes_too_long_is_switched_off(seconds, most):
    """Steps of the target take 1 s. A slow draft model, though its drafts are right, has up to 16 steps of each trial."""
    now, total = [0.0], 0
    target = Timed(now, 1.0)
    target.config = target.config.model_copy(update={"draft_model": DRAFT})
    engine = Engine(target, target.config, secret=b"s", clock=lambda: now[0], draft=Timed(now, seconds))
    for number in range(3):  # 120 tokens in all
        prompt = [5 + number] * 20
        engine.add(EngineRequest(f"r{number}", prompt, greedy(40)))
        got = answers(engine)
        assert got == {f"r{number}": continuation(prompt, 40)}
        total += 40
    stats = engine.stats()
    assert stats.draft_tokens_accepted == stats.draft_tokens
    assert 20 < stats.draft_tokens <= most
    assert (now[0] < 0.7 * total) == (seconds < 1)


def test_a_gate_compares_seconds_per_token():
    gate = DraftGate()

    def run_some(count: int, drafted: float, tokens: int) -> int:
        """Steps of 4 sequences that had drafts; one without takes 1 s."""
        allowed = 0
        for _ in range(count):
            if gate.allows(4):
                allowed += 1
                gate.record_drafted(4, drafted, tokens)
            else:
                gate.record_plain(4, 1.0)
        return allowed

    assert run_some(104, 2.0, 12) == 100, "four steps show what one without takes"
    assert run_some(1000, 2.0, 12) > 980
    assert run_some(80, 2.0, 4) < 40, "more seconds than tokens"
    assert not gate.allows(4)
    assert run_some(10_000, 2.0, 4) < 300
    assert run_some(2000, 2.0, 12) > 900, "it is tried again"
    assert not gate.allows(5), "another number of sequences is measured for itself"


@pytest.mark.parametrize(("seconds", "outputs", "most"), [(1.1, 5, 280), (0.1, 40, 150)])
def test_catching_up_that_costs_more_than_drafts_save_is_switched_off(seconds, outputs, most, monkeypatch):
    """Steps of the target take 1 s without drafts. Prompts of 20 tokens are caught up with in ten chunks, so short answers
    have few drafts or none."""
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 2)
    now, total = [0.0], 0
    target = Timed(now, 1.0)
    target.config = target.config.model_copy(update={"draft_model": DRAFT})
    engine = Engine(target, target.config, secret=b"s", clock=lambda: now[0], draft=Timed(now, seconds))
    while total < 200:
        prompt = [5 + total // outputs] * 20
        engine.add(EngineRequest(f"r{total}", prompt, greedy(outputs)))
        assert len(answers(engine)[f"r{total}"]) == outputs
        total += outputs
    assert now[0] < most


def test_a_gate_counts_what_catching_up_costs():
    gate = DraftGate()
    for _ in range(4):
        gate.record_plain(2, 1.0)
    for _ in range(60):  # four steps with drafts make up for one chunk each
        assert gate.allows(2)
        gate.record_catching_up(2, 4.0)
        for _ in range(4):
            gate.record_plain(2, 1.0)
            gate.record_drafted(2, 1.0, 4)
    for _ in range(33):
        assert gate.allows(2)
        gate.record_catching_up(2, 2.0)
    assert not gate.allows(2)


def run_steps(
    gate: DraftGate, steps: int, tokens: int = 6, slower: Callable[[int], float] = lambda step: 1.0
) -> int:
    """Run steps of 2 sequences; one without drafts takes 1 s, one with drafts 1.5 s for `tokens` in all. Returns how many
    had drafts. `slower`: how many times longer a step takes."""
    drafted = 0
    for step in range(steps):
        if gate.allows(2):
            drafted += 1
            gate.record_drafted(2, 1.5 * slower(step), tokens)
        else:
            gate.record_plain(2, slower(step))
    return drafted


def test_delayed_steps_do_not_turn_drafts_off():
    """One step that stops for a minute, every now and then, and all steps for a while."""
    gate = DraftGate()
    assert run_steps(gate, 200, slower=lambda step: 60.0 if step in (30, 110, 190) else 1.0) == 196
    assert run_steps(gate, 200, slower=lambda step: 5.0 if step < 50 else 1.0) > 180
    for _ in range(20):  # a prompt of many chunks, one of which is delayed
        gate.record_catching_up(2, 1.5)
    gate.record_catching_up(2, 60.0)
    assert run_steps(gate, 100) > 95


def test_drafts_that_do_not_pay_are_measured_twice_before_they_are_off():
    gate = DraftGate()
    found = [run_steps(gate, steps, tokens=2) for steps in (4 + 16 + 4 + 16, 64, 16, 128, 16, 256)]
    assert found == [32, 0, 16, 0, 16, 0]


# --- failures --------------------------------------------------------------------------------------------


class Failing(Observed):
    def execute(self, plan: StepPlan, drawn: Tensor | None = None) -> Tensor:
        if len(self.plans) == 3:
            raise RuntimeError("out of luck")
        return super().execute(plan, drawn)


@pytest.mark.parametrize(("kind", "reason"), [(Failing, "out of luck"), (Observed, "are not finite")])
def test_a_failure_ends_drafting_and_no_request(kind, reason, caplog):
    draft = kind()
    engine = drafting(draft)
    for name in ("a", "b"):
        engine.add(EngineRequest(name, [ord(name) - 60] * 6, greedy(30)))
    if kind is Observed:
        draft.sick.add("b")  # its logits are NaN
    with caplog.at_level(logging.ERROR):
        got = answers(engine)
    assert got == {name: continuation([ord(name) - 60] * 6, 30) for name in ("a", "b")}
    assert engine.stats().draft_failures == 1 and engine._drafter.method is None
    (line,) = [one.getMessage() for one in caplog.records if "speculation has failed" in one.getMessage()]
    assert reason in line


# --- settings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "settings", "message", "field"),
    [
        ("prefill", {"draft_model": DRAFT}, "--draft-model /draft has no effect on a prefill", "draft_model"),
        (
            "decode",
            {"draft_model": DRAFT, "speculation": "ngram"},
            "--draft-model and --speculation ngram exclude",
            "draft_model",
        ),
        ("decode", {"draft_kv_memory_bytes": 5}, "--draft-kv-memory has no effect", "draft_kv_memory"),
    ],
)
def test_settings_without_an_effect_are_refused(role, settings, message, field):
    with pytest.raises(ConfigError, match=message) as caught:
        WorkerConfig(role=role, engine={"model": "/none", **settings})
    assert caught.value.field == field


def test_it_excludes_steps_launched_ahead():
    with pytest.raises(ValidationError, match="draft_model needs them: use overlap auto or no draft_model"):
        EngineConfig(model=Path("/none"), overlap="on", draft_model=DRAFT)


def changed(model: Path, target: Path, **keys: Any) -> Path:
    target.mkdir()
    raw = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, **keys}))
    return target


def test_an_unfit_draft_model_is_refused_before_weights_are_read(checkpoint, tmp_path):
    model = checkpoint("llama")
    unfit: list[tuple[Path, dict[str, Any], str]] = [
        (tmp_path / "none", {}, r"--draft-model .*none: no config.json there"),
        (
            changed(model, tmp_path / "vocab", vocab_size=100_000),
            {},
            "has a vocabulary of 100000 tokens, more than the .* of --model",
        ),
        (changed(model, tmp_path / "kind", architectures=["X"]), {}, r"--draft-model .*kind: "),
        (
            model,
            {"draft_kv_memory_bytes": 10},
            r"--draft-kv-memory: 10 bytes hold 0 blocks of 16 tokens, 16 are needed, which take \d+ bytes",
        ),
    ]
    for draft, more, message in unfit:
        config = WorkerConfig(role="decode", engine={"model": model, "draft_model": draft, **more})
        with pytest.raises(ConfigError, match=message) as caught:
            local.check(config)
        assert caught.value.field in ("draft_model", "draft_kv_memory")


def test_baton_up_is_told_the_size_of_the_draft_models_pool(checkpoint, monkeypatch, capsys):
    config = EngineConfig(model=checkpoint("llama"), draft_model=checkpoint("llama"), page_size=8)
    monkeypatch.setattr(sys, "stdin", io.StringIO(config.model_dump_json()))
    pool_bytes.main()
    size = int(capsys.readouterr().out)
    assert size == load_draft.settings(config).kv_memory_bytes > 0


def test_a_number_of_a_draft_models_configuration_is_refused_with_its_directory(checkpoint, tmp_path):
    draft = changed(checkpoint("llama"), tmp_path / "draft", vocab_size=-5)
    config = WorkerConfig(role="decode", engine={"model": checkpoint("llama"), "draft_model": draft})
    with pytest.raises(ConfigError, match=r"--draft-model .*draft: config.json: vocab_size is -5"):
        local.check(config)


def test_a_draft_models_configuration_that_is_nested_too_deeply_is_refused(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text("[" * 200_000)
    config = WorkerConfig(role="decode", engine={"model": checkpoint("llama"), "draft_model": tmp_path})
    with pytest.raises(ConfigError, match=r"--draft-model .*config.json"):
        local.check(config)


def test_a_vocabulary_without_the_targets_padding_is_fit(checkpoint, tmp_path):
    """As those of small models of the Qwen 2.5 and Gemma 3 families are."""
    model = checkpoint("llama")
    draft = changed(model, tmp_path / "vocab", vocab_size=64)
    config = WorkerConfig(role="decode", engine={"model": model, "draft_model": draft, "device": "cpu"})
    local.check(config)


def test_settings_of_the_draft_models_runner(checkpoint, tmp_path):
    """Its context is the shortest of the target's, its own, and what its pool holds."""
    model = checkpoint("llama")
    short = changed(model, tmp_path / "short", max_position_embeddings=64)
    config = EngineConfig(model=model, draft_model=short, device="cpu", page_size=8, tensor_parallel=2)
    own = load_draft.settings(config)
    assert (own.model, own.max_model_len, own.page_size, own.tensor_parallel) == (short, 64, 8, 1)
    assert (own.draft_model, own.most_drafts) == (None, 0)
    block = own.kv_memory_bytes // (8 * 64 // 8)
    less = config.model_copy(update={"draft_kv_memory_bytes": 17 * block + 1})
    assert load_draft.settings(less).kv_memory_bytes == 17 * block
    small_pages = config.model_copy(update={"page_size": 2, "draft_kv_memory_bytes": 17 * block // 4})
    assert load_draft.settings(small_pages).max_model_len == 17 * 2
    with pytest.raises(
        ConfigError, match=f"hold 15 blocks of 8 tokens, 16 are needed, which take {16 * block} bytes"
    ):
        load_draft.settings(config.model_copy(update={"draft_kv_memory_bytes": 16 * block - 1}))
    long_pages = config.model_copy(update={"page_size": 128})
    assert load_draft.settings(long_pages).kv_memory_bytes == 16 * block * 128 // 8
    shorter = config.model_copy(update={"max_model_len": 48})
    assert load_draft.settings(shorter).max_model_len == 48


@pytest.mark.parametrize("rank", [0, 1])
def test_the_leader_loads_the_draft_model_first(rank, monkeypatch):
    """So that the KV pool is sized by what it leaves, its pool set aside: a CPU's memory is in use once written to."""
    order, set_aside = list[str](), list[int]()
    draft = FakeRunner(4)
    draft.config = draft.config.model_copy(update={"kv_memory_bytes": 4096})

    def loaded(name: str, result: Any, draft_bytes: int = 0) -> Any:
        order.append(name)
        set_aside.append(draft_bytes)
        return result

    monkeypatch.setattr(load_draft, "load", lambda *_: loaded("draft", draft))
    monkeypatch.setattr(
        build, "load_model", lambda *_, draft_bytes, **__: loaded("target", "target", draft_bytes)
    )
    monkeypatch.setattr(local, "replace", lambda model, draft: (model, draft))
    config = WorkerConfig(role="decode", engine={"model": "/none", "device": "cpu", "draft_model": DRAFT})
    result: Any = local.load(config, rank, "")
    assert order == (["draft", "target"] if rank == 0 else ["target"])
    assert result == (("target", draft) if rank == 0 else "target")
    assert set_aside[-1] == (4096 if rank == 0 else 0)


def test_memory_set_aside_for_the_draft_models_pool_is_left_free(checkpoint):
    config = settings_for(checkpoint("llama"), None, "float32")
    aside = 1 << 50
    with pytest.raises(ConfigError, match=f"{aside} for the draft model's KV"):
        load_model(config, draft_bytes=aside)


# --- real models -----------------------------------------------------------------------------------------


def settings_for(model: Path, draft: Path | None, dtype: str) -> EngineConfig:
    return EngineConfig(
        model=model, dtype=dtype, device="cpu", kv_memory_bytes=KV_BYTES, max_model_len=256, draft_model=draft
    )


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
