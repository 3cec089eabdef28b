"""Checkpoints that make embeddings: a model's files with those of sentence-transformers beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cluster.protocol.model_limits import BASES
from tests.harness.checkpoints import reference_model
from tests.harness.embedding_files import write_embedding_files


def make_embedding_model(
    source: Path, target: Path, mode: str = "mean", *, normalised: bool = True, **config: Any
) -> Path:
    """A copy of the checkpoint `source` with modules.json and 1_Pooling. `config`: keys added to config.json."""
    shutil.copytree(source, target)
    own = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**own, **config}))
    write_embedding_files(target, mode, normalised=normalised)
    return target


def make_base_model(path: Path) -> Path:
    """Change the checkpoint at `path` as sentence-transformers saves it: a base model's names, and no output head."""
    own = json.loads((path / "config.json").read_text())
    base = {one: name for name, one in BASES.items()}[own["architectures"][0]]
    (path / "config.json").write_text(json.dumps({**own, "architectures": [base]}))
    weights = load_file(path / "model.safetensors")
    kept = {name.removeprefix("model."): one for name, one in weights.items() if name.startswith("model.")}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    return path


@torch.inference_mode()
def reference_embedding(path: Path, tokens: list[int], mode: str) -> torch.Tensor:
    """Of Hugging Face's base model: its last hidden states, pooled at once. float32 [hidden], not normalised."""
    hidden = reference_model(path).model(torch.tensor([tokens])).last_hidden_state[0]
    if mode == "mean":
        return hidden.mean(0)
    return hidden.amax(0) if mode == "max" else hidden[0 if mode == "cls" else -1]
