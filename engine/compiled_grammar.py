"""The contract of compiled grammars, which requests hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int64]  # a bit for each token of the vocabulary, the lowest one first; 1 = allowed


class Matcher(Protocol):
    """Follows one answer. Used by one thread at a time."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Follow the answer's next tokens. Raises EngineRequestError if the grammar does not allow them."""

    def fill(self, words: Words) -> None:
        """Write which tokens may come next, ends of the answer among them. `words` has `word_count`
        elements. Raises EngineRequestError."""


class CompiledGrammar(Protocol):
    """`size_bytes`: an estimate of its memory."""

    @property
    def size_bytes(self) -> int: ...

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of an answer. Thread-safe."""
