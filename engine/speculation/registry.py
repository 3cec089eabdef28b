"""The method by which an engine's settings make drafts."""

from __future__ import annotations

from cluster.config.worker import EngineConfig
from engine.speculation.base import DraftMethod
from engine.speculation.draft_model import DraftModel, DraftRunner
from engine.speculation.per_sequence import PerSequence
from engine.speculation.prompt_lookup import PromptLookup


def method_for(config: EngineConfig, draft: DraftRunner | None) -> DraftMethod | None:
    """`draft` runs the draft model, if there is one. None: the settings ask for no speculation."""
    if config.draft_model is not None:
        assert draft is not None, "engine/load_draft.py loads it"
        return DraftModel(draft)
    return PerSequence(PromptLookup) if config.speculation == "ngram" else None
