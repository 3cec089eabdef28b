"""The method by which an engine's settings make drafts."""

from __future__ import annotations

from cluster.config.worker import EngineConfig
from engine.speculation.base import DraftMethod
from engine.speculation.per_sequence import PerSequence
from engine.speculation.prompt_lookup import PromptLookup


def method_for(config: EngineConfig) -> DraftMethod | None:
    """None: the settings ask for no speculation."""
    return PerSequence(PromptLookup) if config.speculation == "ngram" else None
