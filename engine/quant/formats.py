"""Quantised checkpoints by their config.json: those that are read, and a sentence for each of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import ModelError

INT8 = "int8"  # int8 weights with a scale per output channel, multiplied by rows of int8
_FIELD = "quantization_config"
_READ = "compressed-tensors with int8 weights per channel and dynamic int8 activations per token (W8A8)"
# quant_method → its common name
_METHODS = {
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "awq": "AWQ",
    "gptq": "GPTQ",
    "mxfp4": "MXFP4",
    "bitsandbytes": "bitsandbytes",
    "modelopt": "ModelOpt",
    "quark": "Quark",
    "torchao": "torchao",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "eetq": "EETQ",
    "higgs": "HIGGS",
    "quanto": "Quanto",
    "spqr": "SpQR",
    "vptq": "VPTQ",
    "bitnet": "BitNet",
    "auto-round": "AutoRound",
}
# compressed-tensors' formats of int8 weights as int8; "naive" is what its first releases wrote.
_INT8_FORMATS = ("int-quantized", "naive-quantized")
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def stored_format(raw: Mapping[str, Any]) -> str:
    """INT8, or "" for a checkpoint that is not quantised. Raises ModelError naming the format."""
    config = raw.get(_FIELD) or raw.get("compression_config")
    if not config:
        return ""
    if not isinstance(config, Mapping):
        raise ModelError(f"{_FIELD} is {config!r}, not a mapping", field=_FIELD)
    method = str(config.get("quant_method", "compressed-tensors" if "config_groups" in config else "unknown"))
    if method != "compressed-tensors":
        name = _METHODS.get(method, f"quant_method {method!r}")
        kind = config.get("quant_algo")  # ModelOpt's
        raise _refused(f"{name} {kind}" if kind else name)
    layout = str(config.get("format"))
    if layout not in _INT8_FORMATS:
        raise _refused(f"compressed-tensors' format {layout!r}")
    for key in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        if config.get(key):
            raise _refused(f"compressed-tensors' {key}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused("compressed-tensors without config_groups")
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise _refused(f"config_groups.{name} = {group!r}")
        _check(name, "weights", group.get("weights"), _WEIGHTS)
        _check(name, "input_activations", group.get("input_activations"), _ROWS)
        if group.get("output_activations"):
            raise _refused(f"{name}.output_activations")
    return INT8


def _check(group: str, part: str, found: Any, wanted: Mapping[str, Any]) -> None:
    values = found if isinstance(found, Mapping) else {}
    for key, value in wanted.items():
        if values.get(key) != value:
            raise _refused(f"{group}.{part}.{key} = {values.get(key)!r}")


def _refused(what: str) -> ModelError:
    return ModelError(
        f"{_FIELD}: {what} is not supported; supported: {_READ}, or the unquantised checkpoint with quantization int8",
        field=_FIELD,
    )
