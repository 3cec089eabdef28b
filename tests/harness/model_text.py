"""The files of a small model that a router reads: tokenizer, chat template and configuration, no weights.

Made without torch and transformers, so that a test of a router starts at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 512
CONTEXT = 1024

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_model_text(path: Path) -> Path:
    """Writes what a router reads of the checkpoint `llama` into `path`."""
    ids = {name: BASE[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **BASE}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps(ids))
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """Byte-level: every byte is a token, ids 3 … 258; the rest of the vocabulary has no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {char: 3 + i for i, char in enumerate(alphabet)}
    vocab |= {f"<{i}>": i for i in range(len(vocab), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": "</s>", "chat_template": '
        '"{% for m in messages %}[{{ m.role }}] {{ m.content }}\\n{% endfor %}[assistant] "}'
    )
