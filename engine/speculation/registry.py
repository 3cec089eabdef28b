"""Chooses the draft method that an engine's settings name."""

from __future__ import annotations

from cluster.config.worker import EngineConfig
from engine.speculation.base import DraftMethod
from engine.speculation.draft_model import DraftModel, DraftRunner
from engine.speculation.per_sequence import PerSequence
from engine.speculation.prompt_lookup import PromptLookup


def method_for(config: EngineConfig, draft: DraftRunner | None) -> DraftMethod | None:
    """Return the method, None without speculation. `draft` runs the draft model, if there is one."""
    if config.draft_model is not None:
        assert draft is not None, "engine/speculation/load_draft.py loads it"
        return DraftModel(draft)
    return PerSequence(PromptLookup) if config.speculation == "ngram" else None
