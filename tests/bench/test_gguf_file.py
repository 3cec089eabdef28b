"""A checkpoint as llama.cpp reads it: the same weights, rows of q and k in its order."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

from bench import checkpoint, gguf_file

SHAPE = checkpoint.ModelShape(
    layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=256, vocab=1024
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return checkpoint.write(tmp_path_factory.mktemp("gguf") / "model", SHAPE)


def read(file) -> dict[str, np.ndarray]:
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(file).tensors
    }


@pytest.mark.parametrize(("form", "error"), [("BF16", 0.0), ("Q8_0", 0.01)])
def test_its_tensors_are_the_checkpoints(model, tmp_path, form: str, error: float) -> None:
    written = read(gguf_file.write(model, tmp_path / "model.gguf", form))
    source = load_file(model / "model.safetensors")

    assert len(written) == len(source)
    pairs = {
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "output_norm": "model.norm",
        "blk.1.attn_v": "model.layers.1.self_attn.v_proj",
        "blk.1.attn_output": "model.layers.1.self_attn.o_proj",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
        "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
        "blk.1.ffn_up": "model.layers.1.mlp.up_proj",
        "blk.1.attn_norm": "model.layers.1.input_layernorm",
        "blk.1.ffn_norm": "model.layers.1.post_attention_layernorm",
    }
    for ours, theirs in pairs.items():
        expected = source[f"{theirs}.weight"].float().numpy()
        np.testing.assert_allclose(written[f"{ours}.weight"], expected, atol=error * np.abs(expected).max())


@pytest.mark.parametrize(("name", "ours", "heads"), [("q", "attn_q", 4), ("k", "attn_k", 2)])
def test_rows_that_turn_together_are_neighbours(model, tmp_path, name: str, ours: str, heads: int) -> None:
    written = read(gguf_file.write(model, tmp_path / "model.gguf", "BF16"))[f"blk.1.{ours}.weight"]
    source = load_file(model / "model.safetensors")[f"model.layers.1.self_attn.{name}_proj.weight"]
    size, half = SHAPE.head_dim, SHAPE.head_dim // 2

    for head in range(heads):
        for pair in range(half):
            for side in (0, 1):
                row = source[head * size + side * half + pair].float().numpy()
                np.testing.assert_array_equal(written[head * size + 2 * pair + side], row)


def test_its_words_are_the_tokenizers(model, tmp_path) -> None:
    fields = gguf.GGUFReader(gguf_file.write(model, tmp_path / "model.gguf", "BF16")).fields

    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == SHAPE.vocab
    assert tokens[fields["tokenizer.ggml.eos_token_id"].contents()] == checkpoint.EOS
    assert fields["llama.attention.head_count_kv"].contents() == SHAPE.kv_heads


def test_a_file_that_exists_is_left(model, tmp_path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"here")

    assert gguf_file.write(model, file, "BF16").read_bytes() == b"here"
