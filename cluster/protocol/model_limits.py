"""Keys of a model's config.json that routers and workers both read, so that both have the same limits."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.errors import ModelError

# Architectures of models for several media whose text part is served: text_config describes it.
WRAPPERS = frozenset({"Gemma3ForConditionalGeneration"})
# Models without an output head, by the architecture that has one: sentence-transformers saves these.
BASES = {
    "LlamaModel": "LlamaForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "Qwen3Model": "Qwen3ForCausalLM",
}
# Hugging Face's defaults by architecture, for configurations without the key: published ones of Gemma 3 have neither.
_CONTEXTS = {
    "MistralForCausalLM": 131_072,
    "Qwen2ForCausalLM": 32_768,
    "Qwen3ForCausalLM": 32_768,
    "Phi3ForCausalLM": 4096,
    "Glm4ForCausalLM": 131_072,
    "MixtralForCausalLM": 131_072,
    "Qwen2MoeForCausalLM": 32_768,
    "Qwen3MoeForCausalLM": 32_768,
    "Glm4MoeForCausalLM": 131_072,
    "GptOssForCausalLM": 131_072,
    "Gemma2ForCausalLM": 8192,
    "Gemma3ForCausalLM": 131_072,
    "Gemma3ForConditionalGeneration": 131_072,
}
_OTHER_CONTEXT = 2048
_VOCABULARIES = {
    "Gemma2ForCausalLM": 256_000,
    "Gemma3ForCausalLM": 262_208,
    "Gemma3ForConditionalGeneration": 262_208,
}


MAX_TEXT_BYTES = 256 << 20  # tokenizers of 262,000 tokens have 35 MB, an index of 100,000 tensors 10 MB


def text_of(file: Path) -> str:
    """The text of a file of a model directory. Raises OSError, or ValueError if it is too large, no regular file, or not
    UTF-8."""
    if (size := check_file(file)) > MAX_TEXT_BYTES:
        raise ValueError(f"{size} bytes are more than the {MAX_TEXT_BYTES} that such a file may have")
    return file.read_text()


def check_file(file: Path) -> int:
    """The size of a regular file. Raises OSError if it is missing, ValueError if it is a directory, a pipe or a device,
    whose reading may not end."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a regular file")
    return found.st_size


def architecture(raw: Mapping[str, Any]) -> str:
    """That with an output head, also of a base model."""
    name = _stored_name(raw)
    return BASES.get(name, name)


def is_base(raw: Mapping[str, Any]) -> bool:
    """A model without an output head, by its architecture."""
    return _stored_name(raw) in BASES


def _stored_name(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "none"


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys that describe the text model. Raises ModelError."""
    if architecture(raw) not in WRAPPERS:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError("config.json has no text_config", field="text_config")
    return text


def context_tokens(raw: Mapping[str, Any]) -> int:
    """The longest context. Raises ModelError."""
    return _positive(raw, "max_position_embeddings") or _CONTEXTS.get(architecture(raw), _OTHER_CONTEXT)


def vocab_size(raw: Mapping[str, Any]) -> int | None:
    """None: the configuration does not say. Raises ModelError."""
    return _positive(raw, "vocab_size") or _VOCABULARIES.get(architecture(raw))


def _positive(raw: Mapping[str, Any], key: str) -> int | None:
    value = text_part(raw).get(key)
    if value is not None and (type(value) is not int or not 0 < value < 2**31):
        raise ModelError(f"config.json: {key} is {value!r}, not a positive number", field=key)
    return value
