"""Masks that take long: the steps of other requests go on without them, and what waits answers as if it had not."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from cluster.grammar.spec import GrammarSpec
from engine import grammar_masks
from engine.scheduler.decision import StepDecision
from tests.engine.grammars import grammar_engine, grammar_request, json_schema, serve

FOUR_DIGITS = GrammarSpec("regex", "[0-9]{4}")
LIST = json_schema({"type": "array", "minItems": 4, "maxItems": 4, "items": {"enum": ["abcd", "abxy"]}})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


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
    return replace(request, tenant=tenant, compiled=Watched(engine.grammars.get(grammar), before))


def test_steps_do_not_wait_for_masks_of_others(model, monkeypatch):
    """Each of 128 sequences held the step for as long as its mask took: 9 s."""
    monkeypatch.setattr(grammar_masks, "MASK_SECONDS", 60.0)
    engine, gate, filled = grammar_engine(model), threading.Event(), list[bool]()
    slow = watched_request(engine, "slow", FOUR_DIGITS, lambda: filled.append(gate.wait(5)), n=4)
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

    def leave_out(decision, plan, sequences):
        late.append(len(sequences))
        return real(decision, plan, sequences)

    monkeypatch.setattr(StepDecision, "leave_out", leave_out)
    assert answered(lambda: time.sleep(draws.choice([0, 0, 0.001]))) == expected
    assert late


def test_tenants_take_turns_in_having_masks_filled(model):
    engine, order = grammar_engine(model), list[str]()
    gate = threading.Event()

    def filled(name):
        order.append(name)
        gate.wait(grammar_masks.MASK_SECONDS / 2)

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
        gate.wait(grammar_masks.MASK_SECONDS / 2)

    for name in ("first", "gone", "last"):
        engine.add(watched_request(engine, name, FOUR_DIGITS, partial(filled, name)))
    engine.step()
    engine.abort("gone")
    gate.set()
    serve(engine)
    assert "gone" not in order and {"first", "last"} <= set(order)
