"""Answers with the same grammar share the states of its lexer. None of them fails because of another one."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from cluster.errors import EngineBusyError, EngineRequestError, GrammarDeadEndError
from cluster.grammar import library
from cluster.grammar.spec import GrammarSpec
from engine.compiled_grammar import Words
from engine.sampling.grammar import llguidance_backend
from engine.sampling.grammar.base import all_allowed
from engine.sampling.grammar.llguidance_backend import LlguidanceBackend

DEMO = Path(__file__).resolve().parents[4] / "demo" / "model"  # its tokens have several bytes
VOCAB, EOS = 4096, 2
# Cheap after `x`. After `y` each token takes more work than the one before.
HEAVY = GrammarSpec("regex", "x[0-9]{9}|y(a|b)*a(a|b){300}c")


@pytest.fixture(scope="module")
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(DEMO, VOCAB, (EOS,))


@pytest.fixture(scope="module")
def encoded() -> Callable[[str], list[int]]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def follow(matcher: Any, tokens: Sequence[int], words: Words) -> None:
    """As an engine does, a mask for each token."""
    for token in tokens:
        matcher.fill(words)
        matcher.accept([token])


def letters(count: int, encoded: Callable[[str], list[int]], seed: int = 1) -> list[int]:
    draws = random.Random(seed)
    return encoded("".join(draws.choice("ab") for _ in range(count)))


def test_a_token_that_takes_too_much_work_ends_its_own_answer_alone(backend, encoded, monkeypatch):
    """The lexer failed for all answers with the same grammar, and for all later ones of the tenant."""
    monkeypatch.setattr(library, "STEP_LEXER_FUEL", 2_000)
    grammar, words = backend.compile(HEAVY), all_allowed(VOCAB)
    other, heavy = grammar.matcher(), grammar.matcher()
    follow(other, encoded("x1"), words)
    with pytest.raises(GrammarDeadEndError, match="too many expressions"):
        follow(heavy, encoded("y") + letters(400, encoded), words)
    follow(other, encoded("23456789"), words)
    later = grammar.matcher()
    follow(later, encoded("x123456789"), words)
    later.fill(words)
    assert [token for token in range(VOCAB) if words[token // 64] >> (token % 64) & 1] == [EOS]


def test_an_answer_is_replayed_with_the_work_that_it_took(backend, encoded, monkeypatch):
    """After a hand-off or a preemption all of its tokens shared the work that one may take."""
    monkeypatch.setattr(library, "STEP_LEXER_FUEL", 20_000)
    words, tokens = all_allowed(VOCAB), encoded("y") + letters(200, encoded)
    grammar = backend.compile(HEAVY)
    first = grammar.matcher()
    follow(first, tokens, words)
    first.fill(words)
    expected = words.copy()
    for fresh in (grammar, backend.compile(HEAVY)):
        beside = fresh.matcher()
        follow(beside, encoded("x1"), words)
        replayed = fresh.matcher()
        replayed.accept(tokens)
        replayed.fill(words)
        assert np.array_equal(words, expected)
        follow(beside, encoded("2"), words)


def test_states_that_are_full_within_a_token_are_no_mismatch(backend, encoded, monkeypatch):
    """The bytes behind the one that filled them seemed not to match, so the request failed and was sent to another
    engine. Tokens of one byte do not show it."""
    words = all_allowed(VOCAB)
    for most in range(700, 730):  # each is reached at another byte
        monkeypatch.setattr(library, "MAX_LEXER_STATES", most)
        grammar = backend.compile(HEAVY)
        for seed in range(3):
            matcher = grammar.matcher()
            matcher.fill(words)
            for token in encoded("y") + letters(300, encoded, seed):
                matcher.accept([token])


def test_states_that_others_have_filled_since_end_no_answer(backend, encoded, monkeypatch):
    """The grammar had been compiled again for the first one that found them full, and had few states left when the next
    one found its own full."""
    monkeypatch.setattr(library, "MAX_LEXER_STATES", 1000)
    grammar, words = backend.compile(HEAVY), all_allowed(VOCAB)
    first, seeds = grammar._start, iter(range(2, 50))

    def answered(seed: int) -> Any:
        matcher = grammar.matcher()
        matcher.fill(words)
        for token in encoded("y") + letters(300, encoded, seed):
            matcher.accept([token])
        return matcher

    early = answered(1)
    while grammar._start is first:
        answered(next(seeds))
    for _ in range(2):
        answered(next(seeds))
    for token in letters(30, encoded):
        early.accept([token])


def test_what_masks_have_looked_at_is_no_memory_of_an_answer(backend, encoded, monkeypatch):
    """A list of 7,500 tokens was ended, though a fifth of the limit was taken: the library counts all that it has looked
    at, and masks look at many tokens that do not come."""
    monkeypatch.setattr(llguidance_backend, "MAX_ANSWER_BYTES", 2 << 20)
    item = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(100)}}
    spec = GrammarSpec("json_schema", json.dumps({"type": "array", "items": item}))
    text = json.dumps([{f"p{7 * i % 90}": "x", f"p{7 * i % 90 + 5}": "y"} for i in range(150)])
    matcher, words = backend.compile(spec).matcher(), all_allowed(VOCAB)
    follow(matcher, encoded(text.replace(" ", "")), words)
    matcher.fill(words)
    assert words[EOS // 64] >> EOS & 1


def test_to_see_what_an_answer_takes_takes_no_long_time(backend, encoded, monkeypatch):
    """600 rules for the same text took 2.5 s, in which the interpreter's lock was free for moments only."""
    monkeypatch.setattr(llguidance_backend, "MAX_ANSWER_BYTES", 100 << 10)
    monkeypatch.setattr(llguidance_backend, "FOLLOW_SECONDS", 0.0)
    grammar = backend.compile(GrammarSpec("json_schema", '{"type": "array", "items": {"type": "integer"}}'))
    matcher, words = grammar.matcher(), all_allowed(VOCAB)
    tokens = encoded(json.dumps([*range(600)]).replace(" ", ""))
    with pytest.raises(GrammarDeadEndError, match="to follow the answer"):
        follow(matcher, tokens, words)
    monkeypatch.setattr(llguidance_backend, "FOLLOW_SECONDS", 60.0)
    follow(grammar.matcher(), tokens[:600], words)


def test_the_first_tokens_of_an_answer_may_not_take_much_memory(backend, encoded, monkeypatch):
    """Nobody looked before its 256th token."""
    monkeypatch.setattr(llguidance_backend, "MAX_ANSWER_BYTES", 100 << 10)
    rules = "\n".join(f"r{i}: r{i} C | C" for i in range(60))
    spec = GrammarSpec("lark", f'start: {" | ".join(f"r{i}" for i in range(60))}\n{rules}\nC: "a"')
    matcher, accepted = backend.compile(spec).matcher(), list[int]()

    def go_on() -> None:
        for token in encoded(2000 * "a"):
            matcher.accept([token])
            accepted.append(token)

    with pytest.raises(GrammarDeadEndError, match="to follow the answer"):
        go_on()
    assert len(accepted) < 150


class Counted:
    """A matcher of the library; `busy`: how many calls there are at once."""

    def __init__(self, matcher: Any, busy: list[int]):
        self._matcher, self._busy = matcher, busy

    def deep_copy(self) -> Counted:
        return Counted(self._matcher.deep_copy(), self._busy)

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._matcher, name)

        def call(*arguments: Any) -> Any:
            if name in ("get_error", "is_error", "stop_reason"):  # which do not wait for others
                return real(*arguments)
            self._busy.append(1)
            try:
                threading.Event().wait(0.001)
                assert len(self._busy) == 1, "the library waits, and holds the interpreter's lock meanwhile"
                return real(*arguments)
            finally:
                self._busy.pop()

        return call


def test_two_threads_do_not_call_a_grammar_at_once(backend, encoded, monkeypatch):
    """The second one waited within the library for the mask of the first, with the interpreter's lock: so did all other
    threads of the worker."""
    real, busy = library.make_matcher, list[int]()
    monkeypatch.setattr(
        llguidance_backend, "make_matcher", lambda *given, **more: Counted(real(*given, **more), busy)
    )
    grammar, failed = backend.compile(HEAVY), list[BaseException]()

    def answer() -> None:
        try:
            follow(grammar.matcher(), encoded("x123456789"), all_allowed(VOCAB))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=answer) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    assert not failed, failed


def test_a_call_that_does_not_end_holds_up_no_other_answer(backend, encoded, monkeypatch):
    monkeypatch.setattr(llguidance_backend, "CALL_SECONDS", 0.05)
    grammar, words = backend.compile(HEAVY), all_allowed(VOCAB)
    matcher: Any = grammar.matcher()
    follow(matcher, encoded("x1"), words)
    start = matcher._start
    with start._calls:  # by a thread that has been given up
        follow(matcher, encoded("2"), words)
        follow(grammar.matcher(), encoded("x1"), words)
    assert matcher._start is not start


def test_a_call_that_waited_for_another_answer_is_no_fault_of_the_grammar(backend, encoded, monkeypatch):
    """On a busy machine the thread of the other call may not get the processor for seconds. That call has ended when it is
    asked why this one failed: the answer ended with "it cannot be followed: NotStopped"."""
    monkeypatch.setattr(llguidance_backend, "CALL_SECONDS", 0.05)
    grammar, words = backend.compile(HEAVY), all_allowed(VOCAB)
    matcher: Any = grammar.matcher()
    follow(matcher, encoded("x1"), words)
    for step in (lambda: matcher.accept(encoded("2")), lambda: matcher.fill(words)):
        start = matcher._start
        monkeypatch.setattr(start, "failure", lambda: "")
        with start._calls:
            step()
        assert matcher._start is not start
    follow(matcher, encoded("3456789"), words)
    with pytest.raises(EngineRequestError, match="does not match"):
        matcher.accept(encoded("z"))


def test_where_no_call_begins_in_time_the_request_may_be_sent_again(backend, encoded, monkeypatch):
    matcher: Any = backend.compile(HEAVY).matcher()
    monkeypatch.setattr(llguidance_backend._Start, "call", lambda self, function, otherwise: otherwise)
    with pytest.raises(EngineBusyError) as caught:
        matcher.accept(encoded("x"))
    assert caught.value.retryable and caught.value.field == "grammar" and caught.value.retry_after_seconds > 0


def test_a_mismatch_stays_one(backend, encoded):
    grammar: Any = backend.compile(HEAVY)
    start, _ = grammar.start()
    with pytest.raises(EngineRequestError, match="does not match"):
        grammar.matcher().accept(encoded("z"))
    assert grammar.start()[0] is start
