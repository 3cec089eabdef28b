"""From a configuration to an engine that runs: model id, runner, tensor-parallel ranks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cluster.errors import ModelError

_SHAPE_KEYS = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
)
_SAMPLE_BYTES = 1 << 20


def make_model_id(model: Path) -> str:
    """Names weights, rope and shapes: two workers with one id hold the same model.

    Weights are identified by file sizes and their headers and first MiB, not read whole: a start must not cost a pass over
    hundreds of gigabytes. Raises ModelError if config.json can't be read.
    """
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{model}/config.json: {error}", field="config.json") from error
    if not isinstance(config, dict):
        raise ModelError(f"{model}/config.json holds no object", field="config.json")
    digest = hashlib.blake2b(digest_size=8)
    digest.update(json.dumps({key: config.get(key) for key in _SHAPE_KEYS}, sort_keys=True).encode())
    for weights in sorted(model.glob("*.safetensors")):
        digest.update(f"{weights.name}:{weights.stat().st_size}".encode())
        with weights.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{model.name}-{digest.hexdigest()}"
