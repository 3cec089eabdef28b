"""Chooses the grammar library of a model."""

from __future__ import annotations

from pathlib import Path

from engine.sampling.grammar.base import GrammarBackend


def backend_for(model: Path, vocab_size: int, eos: tuple[int, ...]) -> GrammarBackend:
    """Make the backend. It reads nothing yet: library and tokenizer are needed at the first grammar only."""
    from engine.sampling.grammar.llguidance_backend import LlguidanceBackend

    return LlguidanceBackend(model, vocab_size, eos)
