"""Files of sentence-transformers beside a model's own: with them it makes embeddings. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_KEYS = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken", "max": "max_tokens"}


def write_embedding_files(model: Path, mode: str = "mean", *, normalised: bool = True) -> int:
    """Write modules.json and 1_Pooling into the directory. Returns the dimensions of its vectors."""
    dimensions = int(json.loads((model / "config.json").read_text())["hidden_size"])
    kinds = ["Transformer", "Pooling", "Normalize"][: 3 if normalised else 2]
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": paths[kind], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "1_Pooling").mkdir()
    pooling: dict[str, Any] = {"word_embedding_dimension": dimensions}
    pooling |= {f"pooling_mode_{key}": name == mode for name, key in _KEYS.items()}
    (model / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return dimensions


def with_embeddings(source: Path, target: Path, mode: str = "mean") -> int:
    """Make `target`, with links to the files of the model `source`, and write the files there. Returns the dimensions."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).symlink_to(file.resolve())
    return write_embedding_files(target, mode)
