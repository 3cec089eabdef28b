"""Grammars by llguidance: a lexer of regular expressions under an Earley parser, walked over a trie of the vocabulary."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cluster.errors import EngineBusyError, EngineRequestError, GrammarDeadEndError, ModelError
from cluster.grammar.library import (
    costs_of,
    is_full,
    is_mismatch,
    lexer_failure,
    make_matcher,
    make_tokenizer,
    reason_of,
)
from cluster.grammar.spec import GrammarSpec
from cluster.protocol.model_limits import text_of
from engine.compiled_grammar import Words
from engine.sampling.grammar.base import RETRY_SECONDS

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# A compiled grammar's memory, which the library does not report: fitted to what processes grew by with schemas of 60 to
# 12,000 characters. Nearly all are estimated at 0.7 to 4 times what they take.
BASE_BYTES = 64 << 10
BYTES_PER_CHARACTER = 80
BYTES_PER_SCHEMA = 6 << 10  # within the schema; one of any values takes the most
BYTES_PER_DIGIT = 700  # of numbers: a range becomes a regular expression of its digits
BYTES_PER_MULTIPLE = 32 << 10
BYTES_PER_REMAINDER = 450  # of a multiple: each is a state
MAX_REMAINDERS = 1_000_000  # more take longer to compile than a worker waits
# Of states that the lexer adds while answers are matched, by their cost: strings with a greatest length grew by 16 per
# unit, (a|b)*a(a|b){30}c by 2.8. Between the two: a third of what the former take.
BYTES_PER_COST = 5
BYTES_PER_ITEM, BYTES_PER_ROW = 8, 40  # of an answer: items of the parser, which stay until it ends
# Objects of 16,000 tokens take 3 MiB. A grammar of many rules for the same text takes 100 KB per token.
MAX_ANSWER_BYTES = 16 << 20
# Of one call, which holds the interpreter lock: 2,000 tokens of 200 ambiguous rules take 3 s.
PIECE_TOKENS = 32
MEASURED_TOKENS = 256  # between two looks at all of these, which take half a millisecond
FIRST_LOOK_TOKENS = 16  # at the memory of an answer: 256 tokens may take more than it may have
# To see what an answer takes without what masks have looked at: 10,000 tokens of JSON take a fifth of it.
FOLLOW_SECONDS, FOLLOW_TOKENS = 0.5, 4
CALL_SECONDS = 2.0  # that a call waits for one of another thread; none takes as long
_HELD = "the library does not end a call for another answer"
T = TypeVar("T")
_SCHEMA = re.compile(r"[:\[,]\s?\{")
_MULTIPLE = re.compile(r'"multipleOf"\s?:\s?([0-9.]+)')
_NUMBER = re.compile(r":\s?-?([0-9][0-9.eE+-]*)")


def estimated_bytes(text: str) -> int:
    """The memory of a compiled grammar of this text; schemas within another grammar count as they do alone."""
    return (
        BASE_BYTES
        + BYTES_PER_CHARACTER * len(text)
        + BYTES_PER_SCHEMA * len(_SCHEMA.findall(text))
        + BYTES_PER_DIGIT * sum(map(len, _NUMBER.findall(text)))
        + BYTES_PER_MULTIPLE * text.count('"multipleOf"')
        + BYTES_PER_REMAINDER * sum(map(_remainders, _MULTIPLE.findall(text)))
    )


def _remainders(multiple: str) -> int:
    """`multiple`: digits and a point; 0.25 has those of 25."""
    return min(int(multiple.replace(".", "")[:9] or "0"), MAX_REMAINDERS)


class _Start:
    """The beginning of all answers, and the lexer's states, which its copies share and add to. When one of them makes the
    lexer fail, by a token that takes too much work or by more states than it may have, all have failed.

    Copies are called by one thread at a time: the library has a lock of its own, but waits for it while it holds that of
    the interpreter, and every thread of the process would wait for another thread's mask.
    """

    def __init__(self, matcher: LLMatcher, probe: int):
        self.first_cost = costs_of(matcher).lexer_cost
        self._matcher, self._probe = matcher, probe
        self._calls = threading.Lock()

    def copy(self) -> LLMatcher:
        return self._matcher.deep_copy()

    def call(self, function: Callable[[], T], otherwise: T) -> T:
        """Call the library. `otherwise`: where another thread's call does not end."""
        if not self._calls.acquire(timeout=CALL_SECONDS):
            return otherwise
        try:
            return function()
        finally:
            self._calls.release()

    def failure(self) -> str:
        """Why all copies fail; empty if they do not."""
        return self.call(lambda: lexer_failure(self._matcher, self._probe), _HELD)


class LlguidanceMatcher:
    """Follows one answer. Where the states that the grammar's matchers share have failed, it goes on in others: what
    follows is a function of the grammar and the answer so far."""

    def __init__(self, grammar: LlguidanceGrammar, mask_bytes: int):
        self._grammar = grammar
        self._mask_bytes = mask_bytes
        self._start, _ = grammar.start()
        self._matcher = self._start.copy()
        self._answer: list[int] = []
        self._next_look = FIRST_LOOK_TOKENS  # at its memory

    def accept(self, tokens: Sequence[int]) -> None:
        for begin in range(0, len(tokens), PIECE_TOKENS):
            piece = list(tokens[begin : begin + PIECE_TOKENS])
            self._answer += piece
            if not self._consumed(piece, masked=begin > 0):
                self._renew()
            self._start.call(partial(self._grammar.used, self._start, self._matcher, len(piece)), None)
            self._check_memory()

    def fill(self, words: Words) -> None:
        words[-1] = 0  # the library writes a multiple of 32 bits, and a word has 64
        if not self._filled(words):
            self._renew(words)
        if not words.any():
            raise GrammarDeadEndError("grammar: no token of the vocabulary may come next", field="grammar")

    def _consumed(self, tokens: list[int], *, masked: bool) -> bool:
        """Whether the matcher has accepted the tokens. `masked`: after a mask that is not used. With each mask the library
        allows as much work as one token may take, and further tokens share that."""

        def consume() -> bool:
            if masked:
                self._matcher.compute_bitmask()
            return self._matcher.consume_tokens(tokens)

        return self._start.call(consume, False)

    def _filled(self, words: Words) -> bool:
        def fill() -> bool:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, self._mask_bytes)
            return not self._matcher.is_error()

        return self._start.call(fill, False)

    def _followed(self, tokens: int, *, masked: bool, until: float = math.inf) -> bool:
        """Follow the whole answer in a new copy of the start, so many tokens at a time. `until`: of the thread's processor
        time in seconds."""
        self._matcher = self._start.copy()
        pieces = (self._answer[begin : begin + tokens] for begin in range(0, len(self._answer), tokens))
        return all(self._consumed(piece, masked=masked) and time.thread_time() < until for piece in pieces)

    def _renew(self, words: Words | None = None) -> None:
        """Go on in states that have not failed, and fill `words`. Raises EngineRequestError if the present ones have not
        failed, or if this answer alone makes them fail, even where each token is followed with all the work that it may
        take; EngineBusyError where calls for other answers hold it up in new states too."""
        tokens, is_new = PIECE_TOKENS, False
        while reason := self._start.failure() or self._held():
            if is_new and (tokens == 1 or is_full(reason)):
                self._grammar.drop(self._start)
                raise _busy() if reason == _HELD else _not_followed(reason)
            tokens = 1 if is_new else tokens
            self._start, is_new = self._grammar.start(instead_of=self._start)
            if self._followed(tokens, masked=True) and (words is None or self._filled(words)):
                return
        raise self._error()

    def _held(self) -> str:
        """Why a call was not made, if the matcher itself has not failed: another answer's has ended only by now."""
        return "" if self._matcher.is_error() else _HELD

    def _error(self) -> EngineRequestError:
        reason = reason_of(self._matcher)
        if is_mismatch(self._matcher):
            return EngineRequestError(
                f"grammar: the answer so far does not match: {reason[:200]}", field="grammar"
            )
        return _not_followed(reason)

    def _check_memory(self) -> None:
        """Raises GrammarDeadEndError."""
        if len(self._answer) < self._next_look:
            return
        taken = self._taken()
        if taken > MAX_ANSWER_BYTES:  # the library counts what masks have looked at too, and does not keep it
            self._follow_anew()
            taken = self._taken()
        if taken > MAX_ANSWER_BYTES:
            raise _too_large()
        each = 2 * max(1, taken) / len(self._answer)  # bytes of a token, at twice the growth so far
        left = int((MAX_ANSWER_BYTES - taken) / each)
        self._next_look = len(self._answer) + min(MEASURED_TOKENS, max(1, left))

    def _follow_anew(self) -> None:
        """Without masks: the lexer has all of the answer's states. Raises GrammarDeadEndError if it takes too long: many
        rules for the same text do."""
        until = time.thread_time() + FOLLOW_SECONDS
        if not self._followed(FOLLOW_TOKENS, masked=False, until=until):
            if time.thread_time() >= until:
                raise _too_large()
            self._renew()

    def _taken(self) -> int:
        """Bytes."""
        costs = self._start.call(lambda: costs_of(self._matcher), None)
        return 0 if costs is None else costs.all_items * BYTES_PER_ITEM + costs.rows * BYTES_PER_ROW


def _too_large() -> GrammarDeadEndError:
    most = f"{MAX_ANSWER_BYTES >> 20} MiB"
    text = f"grammar: to follow the answer takes more than {most}: give fewer rules for the same text"
    return GrammarDeadEndError(text, field="grammar", limit=most)


def _busy() -> EngineBusyError:
    text = "grammar: calls for other answers did not end in time: this worker is too busy"
    return EngineBusyError(
        text, field="grammar", limit=f"{CALL_SECONDS:g} s", retry_after_seconds=RETRY_SECONDS
    )


def _not_followed(reason: str) -> GrammarDeadEndError:
    return GrammarDeadEndError(
        f"grammar: it cannot be followed: {reason[:200]}", field="grammar"
    )  # in any engine


class LlguidanceGrammar:
    """A compiled grammar. Its matchers share the lexer's states, and add to them: `size_bytes` grows with what it is used
    for. In a string of a greatest length each position has about a dozen states."""

    def __init__(self, compile_: Callable[[], LLMatcher], mask_bytes: int, size_bytes: int, probe: int):
        """`probe`: any token but an end-of-sequence token."""
        self._compile = compile_
        self._probe = probe
        self._start: _Start | None = _Start(compile_(), probe)
        self.size_bytes = self._compiled_bytes = size_bytes
        self._mask_bytes = mask_bytes
        self._compiling = threading.Lock()
        self._unmeasured = 0  # tokens

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self, self._mask_bytes)

    def start(self, instead_of: _Start | None = None) -> tuple[_Start, bool]:
        """Return the start of all matchers, and whether it is new. `instead_of`: one that has failed; the grammar is
        compiled again for the first matcher that finds it so."""
        with self._compiling:
            is_new = self._start is None or instead_of is self._start
            if is_new or self._start is None:
                self._start = _Start(self._compile(), self._probe)
                self.size_bytes, self._unmeasured = self._compiled_bytes, 0
            return self._start, is_new

    def drop(self, start: _Start) -> None:
        """Compile the grammar again for the next matcher: this start has failed."""
        with self._compiling:
            if self._start is start:
                self._start = None

    def used(self, start: _Start, matcher: LLMatcher, tokens: int) -> None:
        self._unmeasured += tokens
        if self._unmeasured >= MEASURED_TOKENS:
            self._unmeasured = 0
            added = BYTES_PER_COST * max(0, costs_of(matcher).lexer_cost - start.first_cost)
            self.size_bytes = max(self.size_bytes, self._compiled_bytes + added)


class LlguidanceBackend:
    """Reads the tokenizer at the first grammar."""

    def __init__(self, model: Path, vocab_size: int, eos: tuple[int, ...]):
        self._model = model
        self._vocab_size = vocab_size
        self._eos = eos
        self._loading = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, spec: GrammarSpec) -> LlguidanceGrammar:
        tokenizer = self._loaded()
        return LlguidanceGrammar(
            lambda: make_matcher(spec, tokenizer, measurable=True),
            4 * -(-self._vocab_size // 32),
            estimated_bytes(spec.text),
            next(token for token in range(self._vocab_size) if token not in self._eos),
        )

    def _loaded(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                path = self._model / "tokenizer.json"
                try:
                    text = text_of(path)
                except (OSError, ValueError) as error:
                    raise ModelError(f"{path}: {error}", field="tokenizer.json") from error
                self._tokenizer = make_tokenizer(text, self._vocab_size, self._eos)
            return self._tokenizer
