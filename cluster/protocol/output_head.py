"""Whether a checkpoint has an output head. Without one it makes embeddings only; routers and workers both refuse
generation then."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cluster.protocol import model_limits

MODULES = "modules.json"  # of sentence-transformers: the checkpoint makes embeddings
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_HEAD = "lm_head.weight"
_SIZE_BYTES = 8  # of a safetensors header, little-endian, before it


def has_head(raw: Mapping[str, Any], directory: Path) -> bool:
    """`raw`: the directory's config.json. False: a base model, or one for embeddings whose head is neither stored nor tied
    to the embedding, as of Qwen3-Embedding-8B. A directory without weights has one: its workers refuse what they cannot
    do."""
    if model_limits.is_base(raw):
        return False
    if raw.get("tie_word_embeddings") is not False or not (directory / MODULES).exists():
        return True
    names = _tensor_names(directory)
    return names is None or any(name.endswith(_HEAD) for name in names)


def _tensor_names(directory: Path) -> Collection[str] | None:
    """None: they cannot be read, which is for the reader of the weights to say."""
    try:
        if (index := directory / _INDEX).exists():
            return list(json.loads(model_limits.text_of(index))["weight_map"])
        single = directory / _SINGLE
        model_limits.check_file(single)
        with single.open("rb") as file:
            size = int.from_bytes(file.read(_SIZE_BYTES), "little")
            return list(json.loads(file.read(size))) if size <= model_limits.MAX_TEXT_BYTES else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
