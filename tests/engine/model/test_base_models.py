"""Base models, as sentence-transformers saves them: names without `model.`, and no output head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cluster.errors import ModelError
from cluster.protocol import output_head
from cluster.protocol.model_limits import BASES
from engine.model.config import ModelConfig
from engine.model.families import FAMILIES
from engine.model.layer_weights import LayerWeights
from engine.model.weights import Checkpoint

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def read(directory: Path, architecture: str, **more: object) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps({**SIZES, "architectures": [architecture], **more}))
    return ModelConfig.read(directory)


@pytest.mark.parametrize("base", BASES)
def test_a_base_models_head_is_its_embedding(tmp_path, base):
    config = read(tmp_path, base, is_matryoshka=True, matryoshka_dimensions=[8])
    assert config.family is FAMILIES[BASES[base]]
    stored = torch.arange(64 * 16, dtype=torch.float32).view(64, 16)
    save_file({"embed_tokens.weight": stored, "norm.weight": torch.ones(16)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, torch.float32, torch.device("cpu")) as checkpoint:
        weights = LayerWeights(config, checkpoint, 0, 1)
        embedding = weights.embedding(slice(0, 64))
        assert torch.equal(embedding, stored)
        assert weights.head(slice(0, 64), embedding) is embedding
        assert weights.norm("norm") is not None
        # A whole model's head must be there
        whole = LayerWeights(read(tmp_path, BASES[base]), checkpoint, 0, 1)
        with pytest.raises(ModelError, match=r"lm_head\.weight"):
            whole.head(slice(0, 64), embedding)
    assert not config.generates


def has_heads(directory: Path, **more: object) -> tuple[bool, bool]:
    """As the worker and the router see it."""
    config = read(directory, "Qwen3ForCausalLM", **more)
    raw = json.loads((directory / "config.json").read_text())
    assert output_head.has_head(raw, directory) == config.generates
    return config.generates, config.tie_embeddings


def test_an_embedding_model_whose_head_is_neither_stored_nor_tied_generates_nothing(tmp_path):
    """Qwen3-Embedding-8B: a whole model's architecture."""
    weights = {"embed_tokens.weight": torch.ones(2, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    assert has_heads(tmp_path) == (True, False)  # not for embeddings: its load fails
    (tmp_path / "modules.json").write_text("[]")
    assert has_heads(tmp_path) == (False, True)
    assert has_heads(tmp_path, tie_word_embeddings=True) == (True, True)
    index = tmp_path / "model.safetensors.index.json"
    for head, wanted in (({}, (False, True)), ({"lm_head.weight": "b"}, (True, False))):
        index.write_text(json.dumps({"weight_map": {"embed_tokens.weight": "a", **head}}))
        assert has_heads(tmp_path) == wanted
    index.write_text("[")
    assert has_heads(tmp_path) == (True, False)  # for the reader of the weights to say
    index.unlink()
    save_file({**weights, "lm_head.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    assert has_heads(tmp_path) == (True, False)
    (tmp_path / "model.safetensors").unlink()
    assert has_heads(tmp_path) == (True, False)  # a router's directory needs no weights
