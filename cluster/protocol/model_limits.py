"""Keys of a model's configuration that routers and workers both read, so that both have the same limits."""

from __future__ import annotations

import json
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
_END_TOKENS: dict[str, int | list[int]] = {
    "LlamaForCausalLM": 2,
    "MistralForCausalLM": 2,
    "Phi3ForCausalLM": 32_000,
    "Olmo2ForCausalLM": 50_279,
    "GraniteForCausalLM": 2,
    "Glm4ForCausalLM": [151_329, 151_336, 151_338],
    "MixtralForCausalLM": 2,
    "Gemma2ForCausalLM": 1,
    "Gemma3ForCausalLM": 1,
    "Gemma3ForConditionalGeneration": 1,
}


MAX_TEXT_BYTES = 256 << 20  # tokenizers of 262,000 tokens have 35 MB, an index of 100,000 tensors 10 MB


def text_of(file: Path) -> str:
    """The text of a file of a model directory. Raises OSError, or ValueError if it is too large, no regular file, or not
    UTF-8."""
    if (size := check_file(file)) > MAX_TEXT_BYTES:
        raise ValueError(f"{size} bytes are more than the {MAX_TEXT_BYTES} that such a file may have")
    return file.read_text()


def json_object(file: Path) -> dict[str, Any]:
    """The object that a file of a model directory holds; empty where there is none. Raises ModelError."""
    if not file.exists():
        return {}
    try:
        content = json.loads(text_of(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: {error}", field=file.name) from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds no object", field=file.name)
    return content


def check_file(file: Path) -> int:
    """The size of a regular file. Raises OSError if it is missing, ValueError if it is a directory, a pipe or a device,
    whose reading may not end."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a regular file")
    return found.st_size


def architecture(raw: Mapping[str, Any]) -> str:
    """The architecture with an output head, also of a base model."""
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


def end_tokens(raw: Mapping[str, Any], generation: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    """The end-of-sequence tokens by generation_config.json, else by config.json, whose top level goes before its text
    part, else by Hugging Face's default. Raises ModelError."""
    found = text_part(raw).get("eos_token_id", _END_TOKENS.get(architecture(raw)))
    found = generation.get("eos_token_id", raw.get("eos_token_id", found))
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(one) is int for one in tokens):
        raise ModelError("eos_token_id is not a number or a list of numbers", field="eos_token_id")
    # An id outside the vocabulary is never drawn; as the index of a forbidden token it would be wrong or out of bounds.
    return tuple(one for one in tokens if 0 <= one < vocab)


def _positive(raw: Mapping[str, Any], key: str) -> int | None:
    value = text_part(raw).get(key)
    if value is not None and (type(value) is not int or not 0 < value < 2**31):
        raise ModelError(f"config.json: {key} is {value!r}, not a positive number", field=key)
    return value
