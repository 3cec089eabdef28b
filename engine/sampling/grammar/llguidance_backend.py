"""Grammars by llguidance: a lexer of regular expressions under an Earley parser, walked over a trie of the vocabulary."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import EngineRequestError, GrammarDeadEndError, ModelError
from cluster.grammar.library import costs_of, is_full, is_mismatch, make_matcher, make_tokenizer, reason_of
from cluster.grammar.spec import GrammarSpec
from cluster.protocol.model_limits import text_of
from engine.compiled_grammar import Words

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
PIECE_TOKENS = (
    32  # of one call, which holds the interpreter lock: 2,000 tokens of 200 ambiguous rules take 3 s
)
MEASURED_TOKENS = 256  # between two looks at all of these, which take half a millisecond
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


class LlguidanceMatcher:
    """Follows one answer. Where the states that the grammar's matchers share are full, it goes on in a grammar without
    any: what follows is a function of the grammar and the answer so far."""

    def __init__(self, grammar: LlguidanceGrammar, mask_bytes: int):
        self._grammar = grammar
        self._mask_bytes = mask_bytes
        self._start, self._matcher = grammar.start()
        self._answer: list[int] = []
        self._measured = 0  # tokens of it

    def accept(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        for begin in range(0, len(tokens), PIECE_TOKENS):
            piece = list(tokens[begin : begin + PIECE_TOKENS])
            self._answer += piece
            if not self._matcher.consume_tokens(piece):
                self._renew()
            self._grammar.used(self._matcher, len(piece))
            self._check_memory()

    def _check_memory(self) -> None:
        """Raises GrammarDeadEndError."""
        if len(self._answer) - self._measured >= MEASURED_TOKENS:
            self._measured = len(self._answer)
            costs = costs_of(self._matcher)
            if costs.all_items * BYTES_PER_ITEM + costs.rows * BYTES_PER_ROW > MAX_ANSWER_BYTES:
                raise GrammarDeadEndError(
                    f"grammar: to follow the answer takes more than {MAX_ANSWER_BYTES >> 20} MiB: give fewer rules for "
                    "the same text",
                    field="grammar",
                    limit=f"{MAX_ANSWER_BYTES >> 20} MiB",
                )

    def fill(self, words: Words) -> None:
        words[-1] = 0  # the library writes a multiple of 32 bits, and a word has 64
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, self._mask_bytes)
        if self._matcher.is_error():
            self._renew()
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, self._mask_bytes)
        if self._matcher.is_error():
            raise self._error()
        if not words.any():
            raise GrammarDeadEndError("grammar: no token of the vocabulary may come next", field="grammar")

    def _renew(self) -> None:
        """Raises EngineRequestError for any other reason than full states, or if the answer alone fills them."""
        if not is_full(self._matcher):
            raise self._error()
        self._start, self._matcher = self._grammar.start(instead_of=self._start)
        for begin in range(0, len(self._answer), PIECE_TOKENS):
            if not self._matcher.consume_tokens(self._answer[begin : begin + PIECE_TOKENS]):
                raise self._error()

    def _error(self) -> EngineRequestError:
        reason = reason_of(self._matcher)[:200]
        if is_mismatch(self._matcher):
            return EngineRequestError(f"grammar: the answer so far does not match: {reason}", field="grammar")
        return GrammarDeadEndError(
            f"grammar: it cannot be followed: {reason}", field="grammar"
        )  # in any engine


class LlguidanceGrammar:
    """A compiled grammar. Its matchers share the lexer's states, and add to them: `size_bytes` grows with what it is used
    for. In a string of a greatest length each position has about a dozen states."""

    def __init__(self, compile_: Callable[[], LLMatcher], mask_bytes: int, size_bytes: int):
        self._compile = compile_
        self._start = compile_()
        self.size_bytes = self._compiled_bytes = size_bytes
        self._mask_bytes = mask_bytes
        self._copying = threading.Lock()
        self._first_cost = costs_of(self._start).lexer_cost
        self._unmeasured = 0  # tokens

    def matcher(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self, self._mask_bytes)

    def start(self, instead_of: LLMatcher | None = None) -> tuple[LLMatcher, LLMatcher]:
        """Return the start of all matchers, and a copy to follow an answer by. `instead_of`: a start whose states are
        full; the grammar is compiled again for the first matcher that finds them so."""
        with self._copying:
            if instead_of is self._start:
                self._start = self._compile()
                self.size_bytes, self._unmeasured = self._compiled_bytes, 0
            return self._start, self._start.deep_copy()

    def used(self, matcher: LLMatcher, tokens: int) -> None:
        self._unmeasured += tokens
        if self._unmeasured >= MEASURED_TOKENS:
            self._unmeasured = 0
            added = BYTES_PER_COST * max(0, costs_of(matcher).lexer_cost - self._first_cost)
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
