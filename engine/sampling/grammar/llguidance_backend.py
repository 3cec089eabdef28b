"""Grammars by llguidance: a lexer of regular expressions under an Earley parser, walked over a trie of the vocabulary."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import EngineRequestError, GrammarDeadEndError, ModelError
from cluster.grammar.library import lexer_cost, make_matcher, make_tokenizer, reason_of
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
# Of states that the lexer adds while answers are matched, by their cost: (a|b)*a(a|b){30}c grew by 2.8 for each unit.
BYTES_PER_COST = 3
MEASURED_TOKENS = 256  # between two looks at them, which take half a millisecond
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
    def __init__(self, matcher: LLMatcher, mask_bytes: int, used: Callable[[LLMatcher, int], None]):
        """`used` is called with the number of tokens that were matched."""
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self._used = used

    def accept(self, tokens: Sequence[int]) -> None:
        if tokens and not self._matcher.consume_tokens(list(tokens)):
            raise EngineRequestError(
                f"grammar: the answer so far does not match: {self._reason}", field="grammar"
            )
        self._used(self._matcher, len(tokens))

    def fill(self, words: Words) -> None:
        words[-1] = 0  # the library writes a multiple of 32 bits, and a word has 64
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, self._mask_bytes)
        if self._matcher.is_error():  # in any engine
            raise GrammarDeadEndError(f"grammar: it cannot be followed: {self._reason}", field="grammar")
        if not words.any():
            raise GrammarDeadEndError("grammar: no token of the vocabulary may come next", field="grammar")

    @property
    def _reason(self) -> str:
        return reason_of(self._matcher)[:200]


class LlguidanceGrammar:
    """Its matchers share the lexer's states, and add to them: `size_bytes` grows with what it is used for."""

    def __init__(self, start: LLMatcher, mask_bytes: int, size_bytes: int):
        self._start = start
        self.size_bytes = self._compiled_bytes = size_bytes
        self._mask_bytes = mask_bytes
        self._copying = threading.Lock()
        self._first_cost = lexer_cost(start)
        self._unmeasured = 0  # tokens

    def matcher(self) -> LlguidanceMatcher:
        with self._copying:
            return LlguidanceMatcher(self._start.deep_copy(), self._mask_bytes, self._used)

    def _used(self, matcher: LLMatcher, tokens: int) -> None:
        self._unmeasured += tokens
        if self._unmeasured >= MEASURED_TOKENS:
            self._unmeasured = 0
            added = BYTES_PER_COST * max(0, lexer_cost(matcher) - self._first_cost)
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
        start = make_matcher(spec, self._loaded(), measurable=True)
        return LlguidanceGrammar(start, 4 * -(-self._vocab_size // 32), estimated_bytes(spec.text))

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
