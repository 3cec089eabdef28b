"""The contract of a grammar library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.grammar.spec import GrammarSpec

Words = NDArray[np.int64]  # a bit for each token of the vocabulary, the lowest one first; 1 = allowed


class Matcher(Protocol):
    """Follows one answer. Used by one thread at a time."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Follow the answer's next tokens. Raises EngineRequestError if the grammar does not allow them."""

    def fill(self, words: Words) -> None:
        """Write which tokens may come next, ends of the answer among them. `words` has `word_count`
        elements. Raises EngineRequestError."""


class CompiledGrammar(Protocol):
    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of an answer. Thread-safe."""


class GrammarBackend(Protocol):
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar, in bounded time and memory. Raises InvalidRequestError, or ModelError if the library cannot
        use the model's tokenizer. Thread-safe."""


def all_allowed(vocab: int) -> Words:
    return np.full(word_count(vocab), -1, dtype=np.int64)


def word_count(vocab: int) -> int:
    return -(-vocab // 64)
