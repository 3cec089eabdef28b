"""Masks that take long: the steps of other requests go on without them, and what waits answers as if it had not."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import EngineBusyError
from cluster.grammar.spec import GrammarSpec
from engine import grammar_masks
from engine.engine import Engine
from engine.request import TokenOutput
from engine.scheduler.decision import StepDecision
from tests.engine.sampling.grammar.grammars import (
    GRAMMAR_CONTEXT,
    Answers,
    RandomRunner,
    grammar_engine,
    grammar_request,
    json_schema,
    serve,
)
from tests.engine.speculation.draft_engines import DRAFT
from tests.harness.model_text import VOCAB, make_model_text
from tests.harness.waiting import wait_for

FOUR_DIGITS = GrammarSpec("regex", "[0-9]{4}")
LIST = json_schema({"type": "array", "minItems": 4, "maxItems": 4, "items": {"enum": ["abcd", "abxy"]}})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    make_model_text(made)
    return made


class Watched:
    """A compiled grammar; `before` is called before each of its masks is filled."""

    size_bytes = 0

    def __init__(self, grammar, before):
        self._grammar, self._before = grammar, before

    def matcher(self):
        matcher, before = self._grammar.matcher(), self._before

        class Matcher:
            accept = staticmethod(matcher.accept)

            def fill(self, words):
                before()
                matcher.fill(words)

        return Matcher()


def watched_request(engine, name, grammar, before, tenant="", **more):
    request = grammar_request(name, grammar, **more)
    return replace(request, tenant=tenant, compiled=Watched(engine.grammars.get(grammar, tenant), before))


def test_steps_do_not_wait_for_masks_of_others(model, monkeypatch):
    """Each of 128 sequences held the step for as long as its mask took: 9 s."""
    monkeypatch.setattr(grammar_masks, "WALL_SECONDS", 60.0)
    engine, gate, filled = grammar_engine(model), threading.Event(), list[bool]()
    slow = watched_request(engine, "slow", FOUR_DIGITS, lambda: filled.append(gate.wait(30)), n=4)
    engine.add(slow)
    engine.add(grammar_request("free", None, max_tokens=20))
    tokens = 0
    while tokens < 20:
        tokens += len([one for one in engine.step().tokens if one.request_id == "free"])
    assert not filled
    gate.set()
    answers = serve(engine)
    assert [len(answers.text("slow", choice)) for choice in range(4)] == [4] * 4


@pytest.mark.parametrize("settings", [{}, {"speculation": "ngram"}, {"blocks": 9}, {"overlap": "on"}])
def test_late_answers_are_those_of_masks_in_time(model, monkeypatch, settings):
    def answered(before):
        engine = grammar_engine(model, **settings)
        requests = [watched_request(engine, "r" * i, LIST, before, n=2, max_tokens=16) for i in (1, 2)]
        answers = serve(engine, *requests, grammar_request("free", None, max_tokens=12))
        return {key: [one.token_id for one in tokens] for key, tokens in answers.tokens.items()}

    expected = answered(lambda: None)
    monkeypatch.setattr(grammar_masks, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(grammar_masks, "STEP_PART", 0.0)
    draws, late, real = random.Random(1), list[int](), StepDecision.leave_out

    def counted(decision, plan, sequences):
        late.append(1)
        return real(decision, plan, sequences)

    monkeypatch.setattr(StepDecision, "leave_out", counted)
    assert answered(lambda: time.sleep(draws.choice([0, 0, 0.001]))) == expected
    assert late


def test_tenants_take_turns_in_having_masks_filled(model):
    engine, order = grammar_engine(model), list[str]()
    gate = threading.Event()

    def filled(name):
        order.append(name)
        gate.wait(grammar_masks.WALL_SECONDS / 2)

    for number in range(4):
        engine.add(
            watched_request(
                engine, f"many {number}", FOUR_DIGITS, partial(filled, f"many {number}"), tenant="many"
            )
        )
    engine.add(watched_request(engine, "one", FOUR_DIGITS, partial(filled, "one"), tenant="one"))
    engine.step()
    gate.set()
    serve(engine)
    assert order[:2] == ["many 0", "one"] or order[:3] == ["many 0", "many 1", "one"]


def test_masks_of_requests_that_have_left_are_not_filled(model):
    engine, order, gate = grammar_engine(model), list[str](), threading.Event()

    def filled(name):
        order.append(name)
        gate.wait(grammar_masks.WALL_SECONDS / 2)

    for name in ("first", "gone", "last"):
        engine.add(watched_request(engine, name, FOUR_DIGITS, partial(filled, name)))
    engine.step()
    engine.abort("gone")
    gate.set()
    serve(engine)
    assert "gone" not in order and {"first", "last"} <= set(order)


def test_a_draft_model_goes_on_after_a_late_mask(model):
    """Its cache had the whole sequence, which had no token more: it failed, and speculation stayed off."""
    settings = {"model": model, "context": GRAMMAR_CONTEXT, "vocab": VOCAB}
    runner = RandomRunner(4000, draft_model=DRAFT, **settings)
    engine = Engine(runner, runner.config, secret=b"g", draft=RandomRunner(4000, **settings))
    engine._drafter.gate = None
    late = watched_request(engine, "late", LIST, lambda: time.sleep(0.01), max_tokens=24, temperature=0.0)
    answers = serve(engine, late, grammar_request("free", None, max_tokens=12, temperature=0.0))
    assert answers.text("late") and engine.stats().draft_failures == 0
    assert engine._drafter.method is not None


def test_blocks_that_a_step_writes_for_a_late_one_are_held(model):
    """It was launched behind another step, and the device writes its KV although its token is not taken."""
    engine, gate = grammar_engine(model, overlap="on"), threading.Event()
    engine.add(grammar_request("free", None, max_tokens=200, ignore_eos=True))
    for _ in range(3):
        engine.step()
    late = watched_request(engine, "late", FOUR_DIGITS, lambda: gate.wait(1.0), output_tokens=[])
    blocks = list(engine.reserve(late, [], 8).block_ids)
    runner: Any = engine._runner
    runner.store(blocks, 0, list(late.prompt_tokens))
    engine.commit("late", [TokenOutput("late", 0, len(late.prompt_tokens), 19, 0.0, (), None)])
    engine.step()
    (item,) = [one for one in engine.step_items if one.request_id == "late"]
    flight = engine._flight
    assert flight is not None and "late" not in {s.request.request_id for s in flight.decision.scheduled}
    engine.abort("late")
    gate.set()
    assert item.block_ids[item.begin // runner.page_size] in flight.held


def test_nothing_is_kept_of_requests_that_left_while_they_waited(model):
    """The error of a mask named its sequence, so each stayed, with its prompt and its grammar; and steps were no longer
    launched ahead."""
    engine, gate = grammar_engine(model, overlap="on"), threading.Event()
    engine.add(watched_request(engine, "slow", FOUR_DIGITS, lambda: gate.wait(30)))
    names = [f"gone {number}" for number in range(5)]
    for name in names:
        engine.add(watched_request(engine, name, FOUR_DIGITS, lambda: None))
    engine.step()
    left = [weakref.ref(engine._scheduler.requests[name][0]) for name in names]
    for name in ("slow", *names):
        engine.abort(name)
    engine.add(grammar_request("free", None, max_tokens=20, ignore_eos=True))
    serve(engine)
    runner: Any = engine._runner
    assert not engine._masks.any_waits and runner.ahead > 10
    gate.set()

    def none_is_left():
        gc.collect()
        return not [one for one in left if one() is not None]

    wait_for(none_is_left, 30, "the thread passes over those that have left")


def test_a_mask_that_has_failed_keeps_no_request_that_leaves(model):
    """Its error names the frames in which it was raised."""

    def fail():
        raise ValueError("this grammar has no mask")

    engine = grammar_engine(model)
    engine.add(watched_request(engine, "failed", FOUR_DIGITS, fail))
    (sequence,) = engine._scheduler.requests["failed"]
    engine._masks.look([sequence])
    while not engine._masks._filling[sequence].done():
        time.sleep(0.001)
    left = weakref.ref(sequence)
    del sequence
    engine.abort("failed")
    gc.collect()
    assert left() is None


def test_a_step_waits_once_for_all_its_masks(model, monkeypatch):
    """Not once for each draft that it accepts."""
    waits = list[float]()
    monkeypatch.setattr(grammar_masks, "STEP_SECONDS", 0.05)
    monkeypatch.setattr(grammar_masks, "STEP_PART", 0.0)
    monkeypatch.setattr(grammar_masks, "wait", lambda futures, seconds, **_: waits.append(seconds))
    engine = grammar_engine(model)
    masks: Any = engine._masks
    sequence = object()
    masks._filling = {sequence: Future()}
    monkeypatch.setattr(masks, "_wait", lambda _: None)
    clock = iter([0.0, 0.04, 1.0, 1.03])
    monkeypatch.setattr(grammar_masks, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    masks.begin_step(0.0)
    assert masks.late([sequence]) == masks.late([sequence]) == {sequence}
    assert waits == pytest.approx([0.05, 0.01])


def test_slow_masks_of_one_tenant_delay_none_of_others(model, monkeypatch):
    """They took turns by masks: beside one of half a second, each token of another tenant's waited that long."""
    engine, gate, begun = grammar_engine(model), threading.Event(), threading.Event()
    monkeypatch.setattr(grammar_masks, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(grammar_masks, "SLOW_TIMES", 1e9)
    slow = watched_request(engine, "slow", FOUR_DIGITS, lambda: gate.wait(30) if begun.is_set() else None)
    engine.add(replace(slow, tenant="a"))
    while not engine.step().tokens:
        pass
    begun.set()  # from its second mask on
    monkeypatch.setattr(grammar_masks, "SLOW_SECONDS", 60.0)
    engine.add(replace(grammar_request("quick", FOUR_DIGITS), tenant="b"))
    quick = 0
    while quick < 4:
        quick += len([one for one in engine.step().tokens if one.request_id == "quick"])
    assert not gate.is_set()
    gate.set()
    assert len(serve(engine).text("slow")) <= 4


@pytest.mark.parametrize("third", ["mask", "request"])
def test_a_grammar_that_is_slow_now_and_then_delays_no_other(model, monkeypatch, third):
    """Behind a quick mask the next one was filled among the quick ones again, and so was the first of each request."""
    engine, gate, begun = grammar_engine(model), threading.Event(), threading.Event()
    monkeypatch.setattr(grammar_masks, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(grammar_masks, "SLOW_TIMES", 1e9)
    slow = watched_request(engine, "slow", FOUR_DIGITS, lambda: gate.wait(30) if begun.is_set() else None)
    engine.add(replace(slow, tenant="a"))
    tokens = 0
    while tokens < 2:
        tokens += len(engine.step().tokens)
        if tokens:
            monkeypatch.setattr(grammar_masks, "SLOW_SECONDS", 60.0)
    begun.set()
    if third == "request":
        engine.abort("slow")
        engine.add(replace(slow, tenant="a"))
    engine.add(replace(grammar_request("quick", FOUR_DIGITS), tenant="b"))
    quick = 0
    while quick < 4:
        quick += len([one for one in engine.step().tokens if one.request_id == "quick"])
    assert "slow" in engine._scheduler.requests, "its mask was not waited for until it was given up"
    gate.set()
    serve(engine)


@pytest.mark.parametrize(("last", "waited"), [(0.0, 0.002), (0.004, 0.002), (0.4, 0.1)])
def test_a_step_waits_for_masks_by_the_time_of_the_last_one(model, monkeypatch, last, waited):
    """A quarter of it, so that long steps of a large model do not leave out what is nearly there."""
    waits = list[float]()
    monkeypatch.setattr(grammar_masks, "wait", lambda futures, seconds, **_: waits.append(seconds))
    masks: Any = grammar_engine(model)._masks
    sequence = object()
    masks._filling = {sequence: Future()}
    monkeypatch.setattr(masks, "_wait", lambda _: None)
    masks.begin_step(last)
    assert masks.late([sequence]) == {sequence} and waits == pytest.approx([waited])


@pytest.mark.parametrize(("took", "slow_for"), [(0.02, 0.0), (0.021, 1.05), (0.4, 20.0)])
def test_a_grammar_is_slow_for_fifty_times_what_a_mask_above_20_ms_took(model, monkeypatch, took, slow_for):
    engine, now = grammar_engine(model), [100.0]
    masks: Any = engine._masks
    compiled = engine.grammars.get(FOUR_DIGITS, "")
    engine.add(replace(grammar_request("r", FOUR_DIGITS), compiled=compiled))
    (sequence,) = engine._scheduler.requests["r"]
    monkeypatch.setattr(grammar_masks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    masks.took(compiled, took)
    for later, is_slow in ((slow_for - 0.01, slow_for > 0), (slow_for + 0.01, False)):
        now[0] = 100.0 + later
        assert (masks._filler_of(sequence) is masks._slow) is is_slow, later


@pytest.mark.parametrize("given_up", [False, True])
def test_a_thread_that_cannot_be_started_ends_its_requests_only(model, monkeypatch, given_up):
    """It ended the engine, and all other requests with it."""
    engine, started, gate = grammar_engine(model), threading.Thread.start, threading.Event()
    refuses = not given_up

    def start(thread):
        if refuses and thread.name.startswith("grammar-masks"):
            raise RuntimeError("can't start new thread")
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(grammar_masks, "WALL_SECONDS", 0.2)
    first = watched_request(engine, "first", FOUR_DIGITS, lambda: gate.wait(30))
    answers = Answers()
    for request in (first, watched_request(engine, "second", FOUR_DIGITS, lambda: None)):
        engine.add(request)
        answers.done |= {done.request_id: done for done in engine.step().done}
    refuses = True
    serve(engine, grammar_request("free", None, max_tokens=8), answers=answers)
    gate.set()
    assert len(answers.tokens["free", 0]) == 8
    for name in ("first", "second"):
        error = answers.error(name)
        assert isinstance(error, EngineBusyError) and error.retry_after_seconds > 0
    refuses = False
    assert serve(engine, grammar_request("later", FOUR_DIGITS)).error("later") is None
