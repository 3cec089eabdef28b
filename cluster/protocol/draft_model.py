"""The check of a draft model against its target, by their config.json alone."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.errors import ConfigError, ModelError
from cluster.protocol.model_limits import text_of, vocab_size


def check_draft_model(model: Path, draft: Path) -> None:
    """Raise ConfigError if `draft` is no model directory, or its vocabulary is larger than that of `model`. A
    smaller one may be the same with less padding, as sizes of one family differ. The engine checks whether it supports the
    draft model."""
    if not (draft / "config.json").is_file():
        raise ConfigError(f"--draft-model {draft}: no config.json there", field="draft_model")
    own, target = (_vocabulary(one) for one in (draft, model))
    if own is not None and target is not None and own > target:
        raise ConfigError(
            f"--draft-model {draft} has a vocabulary of {own} tokens, more than the {target} of --model {model}: a "
            f"draft model needs the same tokenizer",
            field="draft_model",
        )


def _vocabulary(directory: Path) -> int | None:
    try:
        raw = json.loads(text_of(directory / "config.json"))
        return vocab_size(raw) if isinstance(raw, dict) else None
    except (OSError, ValueError, RecursionError, ModelError):
        return None  # the engine refuses it, with the reason
