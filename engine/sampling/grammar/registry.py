"""The grammar library of a model."""

from __future__ import annotations

from pathlib import Path

from engine.sampling.grammar.base import GrammarBackend


def backend_for(model: Path, vocab_size: int, eos: tuple[int, ...]) -> GrammarBackend:
    """Reads nothing yet: neither the library nor the tokenizer is needed before the first grammar."""
    from engine.sampling.grammar.llguidance_backend import LlguidanceBackend

    return LlguidanceBackend(model, vocab_size, eos)
