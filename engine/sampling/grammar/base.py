"""The contract of a grammar library."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from cluster.grammar.spec import GrammarSpec
from engine.compiled_grammar import CompiledGrammar, Words

RETRY_SECONDS = 2.0  # after a wait for a processor that was too long


class GrammarBackend(Protocol):
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar, in bounded time and memory. Raises InvalidRequestError, or ModelError if the library cannot
        use the model's tokenizer. Thread-safe."""


def all_allowed(vocab: int) -> Words:
    return np.full(word_count(vocab), -1, dtype=np.int64)


def word_count(vocab: int) -> int:
    return -(-vocab // 64)
