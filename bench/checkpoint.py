"""A random checkpoint of a common shape, so that the benchmark downloads nothing.

Its tokenizer is made up: bytes, and pairs and triples of letters, so that random token ids are readable text and
any text can be encoded.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTEXT_TOKENS = 4096
EOS = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": EOS,
    "chat_template": TEMPLATE,
    "model_max_length": CONTEXT_TOKENS,
    "clean_up_tokenization_spaces": False,
}

_DENSE_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
}
_EXPERTS_CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "sliding_window": None,
}


@dataclass(frozen=True)
class ModelShape:
    """Llama-shaped, or Mixtral-shaped with `experts` in each layer; without biases, embeddings not tied. `intermediate` is
    one expert's."""

    layers: int = 16
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 64
    intermediate: int = 2816
    vocab: int = 8192
    context_tokens: int = CONTEXT_TOKENS
    experts: int = 0
    experts_per_token: int = 0

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of one layer's matrix products for a token, as an engine runs them: q, k and v in one, gate
        and up in one."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = [(self.hidden, q + 2 * kv), (q, self.hidden)]
        mlp = [(self.hidden, 2 * self.intermediate), (self.intermediate, self.hidden)]
        if not self.experts:
            return attention + mlp
        return [*attention, (self.hidden, self.experts), *mlp * self.experts_per_token]

    @property
    def linear_weights(self) -> int:
        """Parameters in all layers' matrices that a token is multiplied by."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def decode_weight_bytes(self) -> int:
        """Bytes that a decode step of one sequence reads: its matrices and the output head, bf16. Of the embedding
        only a row."""
        return 2 * (self.linear_weights + self.vocab * self.hidden)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * 2


SHAPE = ModelShape()


def write(directory: Path, shape: ModelShape = SHAPE, seed: int = 0) -> Path:
    """Write it once; a complete directory is left as it is."""
    done = directory / ".complete"
    if done.exists():
        return directory
    write_model(directory, shape, seed)
    _write_json(directory / "tokenizer_config.json", _TOKENIZER_CONFIG)
    _write_json(directory / "tokenizer.json", _tokenizer(shape.vocab))
    done.touch()
    return directory


def write_model(directory: Path, shape: ModelShape, seed: int = 0, device: str = "cpu") -> Path:
    """Write what an engine needs: no tokenizer. The weights are drawn on `device`."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config(shape))
    _write_json(directory / "generation_config.json", {"eos_token_id": shape.vocab - 1})
    _write_weights(directory / "model.safetensors", shape, seed, device)
    return directory


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        **(_EXPERTS_CONFIG | _expert_counts(shape) if shape.experts else _DENSE_CONFIG),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": shape.vocab - 1,
        "bos_token_id": None,
    }


def _expert_counts(shape: ModelShape) -> dict[str, Any]:
    return {"num_local_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token}


def _write_weights(file: Path, shape: ModelShape, seed: int, device: str) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator, device=device) * 0.02).to("cpu", torch.bfloat16)

    tensors = {name: normal(*size) for name, size in _matrices(shape)}
    tensors.update({name: torch.ones(shape.hidden, dtype=torch.bfloat16) for name in _norms(shape)})
    save_file(tensors, file, metadata={"format": "pt"})


def _matrices(shape: ModelShape) -> Iterator[tuple[str, tuple[int, int]]]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.self_attn.q_proj.weight", (q, shape.hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv, shape.hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv, shape.hidden)
        yield f"{layer}.self_attn.o_proj.weight", (shape.hidden, q)
        if shape.experts:
            yield from _expert_matrices(f"{layer}.block_sparse_moe", shape)
            continue
        yield f"{layer}.mlp.gate_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{layer}.mlp.up_proj.weight", (shape.intermediate, shape.hidden)
        yield f"{layer}.mlp.down_proj.weight", (shape.hidden, shape.intermediate)
    yield "lm_head.weight", (shape.vocab, shape.hidden)


def _expert_matrices(mixture: str, shape: ModelShape) -> Iterator[tuple[str, tuple[int, int]]]:
    yield f"{mixture}.gate.weight", (shape.experts, shape.hidden)
    for index in range(shape.experts):
        yield f"{mixture}.experts.{index}.w1.weight", (shape.intermediate, shape.hidden)
        yield f"{mixture}.experts.{index}.w3.weight", (shape.intermediate, shape.hidden)
        yield f"{mixture}.experts.{index}.w2.weight", (shape.hidden, shape.intermediate)


def _norms(shape: ModelShape) -> Iterator[str]:
    for index in range(shape.layers):
        yield f"model.layers.{index}.input_layernorm.weight"
        yield f"model.layers.{index}.post_attention_layernorm.weight"
    yield "model.norm.weight"


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Byte-level BPE: 256 bytes, then merges of letters until `vocab_size` - 1, then the end token."""
    from tokenizers.pre_tokenizers import ByteLevel

    symbols = sorted(ByteLevel.alphabet())
    pairs = [(a, b) for a, b in itertools.product(string.ascii_lowercase, repeat=2)]
    triples = [(a + b, c) for a, b in pairs for c in string.ascii_lowercase]
    merges = [*pairs, *triples][: vocab_size - 1 - len(symbols)]
    tokens = [*symbols, *(a + b for a, b in merges), EOS]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": len(tokens) - 1, "content": EOS, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, **flags}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [f"{a} {b}" for a, b in merges],
        },
    }


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False))
