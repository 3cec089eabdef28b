"""Writes a benchmark checkpoint as the one file that llama.cpp reads (GGUF)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from safetensors.torch import load_file
from torch import Tensor

_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write(checkpoint: Path, file: Path, form: str) -> Path:
    """Write `checkpoint`, one of `bench/checkpoint.py`, to `file`, which is left as it is if it exists; return it.

    `form`: of its matrices, "BF16" or "Q8_0" (32 codes of 8 bits with one scale); vectors are in fp32.
    """
    if file.exists():
        return file
    config = json.loads((checkpoint / "config.json").read_text())
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    _add_shape(writer, config)
    _add_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    kind = gguf.GGMLQuantizationType[form]
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        at = name.removesuffix(".weight")
        rotated = heads.get(at.rpartition(".")[2])
        values = (_interleaved(tensor, rotated) if rotated else tensor).float().numpy()
        if tensor.dim() == 2:
            writer.add_tensor(_name(at), gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_name(at), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.rename(file)


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    ends = {token["id"] for token in tokenizer["added_tokens"]}
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([control if index in ends else normal for index in range(len(vocab))])
    writer.add_token_merges(tokenizer["model"]["merges"])
    writer.add_eos_token_id(max(ends))
    writer.add_add_bos_token(False)


def _interleaved(matrix: Tensor, heads: int) -> Tensor:
    """Rows in the order of llama.cpp's rotary embedding: it turns rows 2i and 2i + 1 of a head together, Hugging Face
    i and i + head_dim / 2. `matrix`: [heads × head_dim, inputs]."""
    outputs, inputs = matrix.shape
    return matrix.view(heads, 2, outputs // heads // 2, inputs).transpose(1, 2).reshape(outputs, inputs)


def _name(at: str) -> str:
    if at in _OTHER_NAMES:
        return f"{_OTHER_NAMES[at]}.weight"
    _, _, layer, part = at.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"
