"""Settings that config.json alone rules out. Free of torch: `baton up` checks them before it starts any process."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cluster.config.worker import EngineConfig
from cluster.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.shares import check_shares

# Bytes of a number; every other type: at least half of one
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_ROUNDED = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}
# By the prefixes of `layer_weights`, which imports torch
_LAYER = re.compile(r"(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d+)\.")


def read_model(config: EngineConfig) -> ModelConfig:
    """Read config.json and check the settings against it. Raises ModelError naming the key, or ConfigError naming the
    setting."""
    model = ModelConfig.read(config.model)
    check_shares(model, config.tensor_parallel, expert_parallel=config.expert_parallel)
    check_settings(config, model)
    return model


def check_settings(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError naming the setting that this model cannot have."""
    how = config.quantization
    if how != "auto" and model.experts is not None:
        raise ConfigError(
            f"quantization {how}: experts are not supported in {how}, and {model.family.title} has them: use auto",
            field="quantization",
        )
    if how in ("fp8", "int4") and (why := why_not_rounded(model)):
        raise ConfigError(f"quantization {how}: {why}: use auto or int8", field="quantization")
    if config.max_model_len > model.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the model's {model.max_model_len}",
            field="max_model_len",
        )


def why_not_rounded(model: ModelConfig) -> str:
    """Why the settings fp8 and int4 cannot be this model's; "" if they can."""
    if model.experts is not None:
        return f"{model.family.title} has experts"
    return "" if model.quantization is None else f"it is quantised already ({model.quantization.title})"


def least_bytes(config: EngineConfig, model: ModelConfig, files: Iterable[Path]) -> int:
    """A lower bound of the bytes of all ranks' weights, by the headers of the files. A damaged file counts as empty."""
    computed = 4 if config.dtype == "float32" or (config.dtype, model.dtype) == ("auto", "float32") else 2
    widest = computed if model.quantization is not None else _ROUNDED.get(config.quantization, computed)
    total = 0.0
    for file in files:
        with contextlib.suppress(SafetensorError, OSError):
            if file.is_file():
                total += sum(_tensor_bytes(file, model, widest))
    return int(total)


def least_context_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """A lower bound of the bytes that the KV of one longest context takes on one rank."""
    tokens = config.max_model_len or model.max_model_len
    heads = max(1, model.num_kv_heads // config.tensor_parallel)
    number = 1 if config.kv_dtype == "int8" else 2
    return 2 * model.num_layers * heads * model.head_dim * number * tokens


def _tensor_bytes(file: Path, model: ModelConfig, widest: float) -> Iterator[float]:
    with safe_open(str(file), "np") as handle:
        names = handle.keys()
        for name in names:
            if _is_loaded(name, model):
                tensor = handle.get_slice(name)
                yield math.prod(tensor.get_shape()) * min(widest, _WIDTHS.get(tensor.get_dtype(), 0.5))


def _is_loaded(name: str, model: ModelConfig) -> bool:
    """Whether a tensor is one of the text model: wrappers store others too, some families layers for drafts."""
    if layer := _LAYER.match(name):
        return int(layer[1]) < model.num_layers
    return name.endswith("embed_tokens.weight") or (
        name.endswith("lm_head.weight") and not model.tie_embeddings
    )
