"""Quantised checkpoints by their config.json: what each is computed as on which device."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import ModelError

INT8, FP8, FP8_BLOCKS, PACKED = "int8", "fp8", "fp8-blocks", "packed"
AWQ, GPTQ, MXFP4, MXFP4_EXPERTS = "awq", "gptq", "mxfp4", "mxfp4-experts"
ROUNDED_INT4, ROUNDED_FP8 = "rounded-int4", "rounded-fp8"  # while they are loaded
PLAIN = ""  # not quantised
MX_GROUP = 32  # inputs that share a scale in the MX formats
_FIELD = "quantization_config"
_SIZES = range(1, 1 << 31)  # of groups and blocks
_SHORT = reprlib.Repr()  # config.json is untrusted: a value in an error is cut, however long or deep it is
_SHORT.maxstring = _SHORT.maxother = 60


@dataclass(frozen=True)
class Computed:
    """How products with matrices of a format are computed. `size`: that of a weight, as text."""

    name: str
    size: str


DTYPE = Computed("expanded to `--dtype` while loading", "2 or 4 bytes")
AS_STORED = Computed("`--dtype`", "2 or 4 bytes")
INT8_KERNELS = Computed("int8, Baton's kernels", "1 byte")
INT8_TORCH = Computed("int8, torch's fp32 product of slices, whose sums are exact", "1 byte")
INT8_CUDA = Computed("int8, Baton's kernels; without Triton, torch's integer product", "1 byte")
VNNI, CPU, CUDA = "CPU with AVX512-VNNI", "other CPUs", "CUDA"
DEVICES = (VNNI, CPU, CUDA)


@dataclass(frozen=True)
class Format:
    """A row of the table. `cells`: how it is computed on each device. `writer`: the library whose files the tests read; ""
    where there is none."""

    title: str
    cells: Mapping[str, Computed]
    writer: str = ""


def _int8() -> dict[str, Computed]:
    return {VNNI: INT8_KERNELS, CPU: INT8_TORCH, CUDA: INT8_CUDA}


def _expanded(on_cuda: str = "", on_cpu: str = "", codes: str = "as stored") -> dict[str, Computed]:
    """The bytes of a weight whose `codes` are kept on CUDA, and on CPUs."""
    cells = dict.fromkeys(DEVICES, DTYPE)
    for device, kept in ((CUDA, on_cuda), (VNNI, on_cpu)):
        if kept:
            how = f"{codes} ({kept}) in bf16 by Baton's kernels"
            which = "([which](serve-a-model.md#quantisation))"
            cells[device] = Computed(f"{how}, or {DTYPE.name} {which}", DTYPE.size)
    return cells


# By name. With `--quantization int8` every format has the cells of INT8.
FORMATS: dict[str, Format] = {
    PLAIN: Format("fp32, bf16, fp16", dict.fromkeys(DEVICES, AS_STORED)),
    INT8: Format(
        "compressed-tensors: int8 weights per channel, dynamic int8 activations per token (W8A8)",
        _int8(),
        "compressed-tensors 0.20.0",
    ),
    FP8: Format(
        "compressed-tensors: FP8 E4M3 per tensor, channel or block (W8A8, W8A16)",
        _expanded("1 byte"),
        "compressed-tensors 0.20.0",
    ),
    FP8_BLOCKS: Format(
        "FP8 E4M3 as DeepSeek and Qwen ship it (`quant_method` fp8: `weight_scale_inv` per block, or per tensor)",
        _expanded("1 byte"),
        "transformers 5.23.0",
    ),
    PACKED: Format(
        "compressed-tensors: 4 or 8 bits packed, per group or channel, symmetric or not, with or without g_idx (W4A16, "
        "W8A16)",
        _expanded("½ or 1 byte", "4 bits: ½ byte"),
        "compressed-tensors 0.20.0; 0.9.4 with g_idx",
    ),
    AWQ: Format("AWQ, 4 bits, gemm packing", _expanded("½ byte", "½ byte"), "AutoAWQ 0.2.9"),
    GPTQ: Format(
        "GPTQ, 4 or 8 bits, with or without act-order (desc_act); zero points of format v1, and of v2 (~)",
        _expanded("½ or 1 byte", "4 bits: ½ byte"),
        "AutoGPTQ 0.7.1",
    ),
    ROUNDED_INT4: Format(
        "fp32, bf16, fp16 with `--quantization int4`: groups of 128, output head as stored",
        _expanded("½ byte", "½ byte", "rounded"),
    ),
    ROUNDED_FP8: Format(
        "fp32, bf16, fp16 with `--quantization fp8`: E4M3, groups of 128, output head as stored",
        _expanded("1 byte", codes="rounded"),
    ),
    MXFP4: Format("compressed-tensors: MXFP4 weights (W4A16)", _expanded(), "compressed-tensors 0.20.0"),
    MXFP4_EXPERTS: Format(
        "MXFP4 experts as gpt-oss ships them (`quant_method` mxfp4)",
        dict.fromkeys(DEVICES, DTYPE),
        "transformers 5.23.0",
    ),
}
# quant_method → its common name
_METHODS = {
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
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
# compressed-tensors' formats that are not read → common names
_LAYOUTS = {
    "nvfp4-pack-quantized": "NVFP4, ",
    "mxfp8-quantized": "MXFP8, ",
    "mxfp6-pack-quantized": "MXFP6, ",
}


@dataclass(frozen=True)
class StoredFormat:
    """How a checkpoint stores its matrices. `block`: (outputs, inputs) that share a scale; 0: all of them."""

    name: str  # in FORMATS
    block: tuple[int, int] = (1, 0)
    bits: int = 8
    symmetric: bool = True
    zero_offset: int = 0  # subtracted from GPTQ's stored zero points
    act_order: bool = False  # inputs may be in groups in any order

    @property
    def title(self) -> str:
        return FORMATS[self.name].title

    @property
    def rounded(self) -> bool:
        """Whether the file has plain weights, which are rounded while they are loaded."""
        return self.name in (ROUNDED_INT4, ROUNDED_FP8)


_ROUNDED = {  # by the setting `quantization`
    "int4": StoredFormat(ROUNDED_INT4, (1, 128), bits=4),
    "fp8": StoredFormat(ROUNDED_FP8, (1, 128)),
}


def of_matrices(stored: StoredFormat | None, quantization: str) -> StoredFormat | None:
    """The format in which matrices are read, for the setting `quantization`. None: they are plain, and stay so."""
    return _ROUNDED.get(quantization, stored)


def stored_format(raw: Mapping[str, Any]) -> StoredFormat | None:
    """None for a checkpoint that is not quantised. Raises ModelError naming the format."""
    config = raw.get(_FIELD) or raw.get("compression_config")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ModelError(f"{_FIELD} is {_shown(config)}, not a mapping", field=_FIELD)
    method = str(config.get("quant_method", "compressed-tensors" if "config_groups" in config else "unknown"))
    if (reader := _READERS.get(method)) is not None:
        return reader(config)
    name = _METHODS.get(method, f"quant_method {_shown(method)}")
    kind = config.get("quant_algo")  # ModelOpt's
    raise _refused(f"{name} {_name(kind)}" if kind else name)


def computed(stored: StoredFormat | None, quantization: str, device: str) -> Computed:
    """How a checkpoint is computed, for the setting `quantization` on one of DEVICES."""
    if quantization == INT8:
        return FORMATS[INT8].cells[device]
    how = of_matrices(stored, quantization)
    return FORMATS[PLAIN if how is None else how.name].cells[device]


def is_int8(stored: StoredFormat | None, quantization: str) -> bool:
    """Whether its matrices are computed as int8."""
    return quantization == INT8 or (stored is not None and stored.name == INT8)


def _compressed_tensors(config: Mapping[str, Any]) -> StoredFormat:
    layout = str(config.get("format"))
    if layout not in _GROUPS:
        raise _refused(f"{_LAYOUTS.get(layout, '')}compressed-tensors' format {_shown(layout)}")
    sparsity = config.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        raise _refused("compressed-tensors' sparsity_config")
    _refuse("compressed-tensors", config, "transform_config", "kv_cache_scheme")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused("compressed-tensors without config_groups")
    found = []
    for key, group in groups.items():
        name = _name(key)
        if not isinstance(group, Mapping):
            raise _refused(f"config_groups.{name} = {_shown(group)}")
        _refuse(name, group, "output_activations")
        if group.get("format") not in (None, layout):
            raise _refused(f"{name}.format = {_shown(group['format'])} in format {layout!r}")
        found.append(_GROUPS[layout](name, _part(group, "weights"), _part(group, "input_activations")))
    if len(set(found)) > 1:
        raise _refused("config_groups whose weights differ")
    return found[0]


def _part(group: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = group.get(key)
    return value if isinstance(value, Mapping) else {}


def _naive(name: str, weights: Mapping[str, Any], rows: Mapping[str, Any]) -> StoredFormat:
    """Read `naive-quantized`, the name of compressed-tensors' first releases for all formats of 8 bits."""
    read = _float_group if weights.get("type") == "float" else _int_group
    return read(name, weights, rows)


def _int_group(name: str, weights: Mapping[str, Any], rows: Mapping[str, Any]) -> StoredFormat:
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    _check(f"{name}.weights", weights, {**common, "strategy": "channel", "dynamic": False})
    _check(f"{name}.input_activations", rows, {**common, "strategy": "token", "dynamic": True})
    return StoredFormat(INT8)


def _float_group(name: str, weights: Mapping[str, Any], rows: Mapping[str, Any]) -> StoredFormat:
    _check(f"{name}.weights", weights, {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False})
    if rows:  # these are not rounded, so their scales do not matter
        _check(f"{name}.input_activations", rows, {"num_bits": 8, "type": "float"})
    strategy = weights.get("strategy")
    if strategy == "block":
        return StoredFormat(FP8, _block(f"{name}.weights.block_structure", weights.get("block_structure")))
    if strategy not in ("tensor", "channel"):
        raise _refused(f"{name}.weights.strategy = {_shown(strategy)}")
    return StoredFormat(FP8, (0, 0) if strategy == "tensor" else (1, 0))


def _packed_group(name: str, weights: Mapping[str, Any], rows: Mapping[str, Any]) -> StoredFormat:
    _check(f"{name}.weights", weights, {"type": "int", "dynamic": False})
    if rows:
        raise _refused(f"{name}.input_activations with packed weights")
    group = 0
    if weights.get("strategy") == "group":
        group = _group_size(f"{name}.weights.group_size", weights.get("group_size"))
    elif weights.get("strategy") != "channel":
        raise _refused(f"{name}.weights.strategy = {_shown(weights.get('strategy'))}")
    bits = _bits(f"{name}.weights.num_bits", weights.get("num_bits"), (4, 8))
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool):
        raise _refused(f"{name}.weights.symmetric = {_shown(symmetric)}")
    return StoredFormat(PACKED, (1, group), bits, symmetric, act_order=weights.get("actorder") == "group")


def _mxfp4_group(name: str, weights: Mapping[str, Any], rows: Mapping[str, Any]) -> StoredFormat:
    wanted = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": MX_GROUP, "symmetric": True}
    _check(f"{name}.weights", weights, wanted)
    if rows:
        raise _refused(f"{name}.input_activations with MXFP4 weights")
    return StoredFormat(MXFP4, (1, MX_GROUP), 4)


_GROUPS = {
    "int-quantized": _int_group,
    "float-quantized": _float_group,
    "naive-quantized": _naive,
    "pack-quantized": _packed_group,
    "mxfp4-pack-quantized": _mxfp4_group,
}


def _fp8(config: Mapping[str, Any]) -> StoredFormat:
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refused(f"fp8.fmt = {_shown(config['fmt'])}")
    _check("fp8", {"expert_dtype": "fp8", **config}, {"expert_dtype": "fp8"})
    # GPTQModel's FP8: weights are divided by weight_scale_inv; in every other writer's files they are multiplied by it
    _refuse("fp8", config, "weight_scale_semantics", "modules_to_convert", "kv_cache_scheme")
    size = config.get("weight_block_size")
    if size is None:
        return StoredFormat(FP8_BLOCKS, (0, 0))
    block = _block("fp8.weight_block_size", size)
    if block == (1, MX_GROUP):
        raise _refused("MXFP8")
    return StoredFormat(FP8_BLOCKS, block)


def _awq(config: Mapping[str, Any]) -> StoredFormat:
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm" or config.get("backend") == "llm-awq":
        raise _refused(f"AWQ's packing {_shown(version)}")
    _refuse("awq", config, *_BESIDE_WEIGHTS)
    bits = _bits("awq.bits", config.get("bits", config.get("w_bit", 4)), (4,))
    if not config.get("zero_point", True):
        raise _refused("AWQ without zero points")
    group = _group_size("awq.group_size", config.get("group_size", config.get("q_group_size", 128)))
    return StoredFormat(AWQ, (1, group), bits, symmetric=False)


def _gptq(config: Mapping[str, Any]) -> StoredFormat:
    # Two names of one setting; loaders differ in which they prefer
    named = [config[key] for key in ("checkpoint_format", "format") if config.get(key)]
    layout = str(named[0]).lower() if named else "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise _refused(f"GPTQ's format {_shown(layout)}")
    if len(named) == 2 and str(named[1]).lower() != layout:
        raise _refused(f"GPTQ's format {_shown(named[1])} with checkpoint_format {layout!r}")
    if config.get("dynamic"):
        raise _refused("GPTQ with settings of its own for some modules ('dynamic')")
    _refuse("gptq", config, "is_marlin_format", *_BESIDE_WEIGHTS)
    bits = _bits("gptq.bits", config.get("bits"), (4, 8))
    group = _group_size("gptq.group_size", config.get("group_size", 128))
    offset, act_order = int(layout == "gptq"), bool(config.get("desc_act"))
    return StoredFormat(GPTQ, (1, group), bits, False, offset, act_order)


def _mxfp4(config: Mapping[str, Any]) -> StoredFormat:
    """The other settings are not needed: they say which layers are not quantised, which the tensors show too, and how
    other engines compute."""
    return StoredFormat(MXFP4_EXPERTS, (1, MX_GROUP), 4)


# GPTQModel's: inputs are to be rotated, or a low-rank product added, when the model runs
_BESIDE_WEIGHTS = ("rotation", "adapter")
_READERS = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}


def _bits(where: str, found: Any, known: Sequence[int]) -> int:
    if found not in known or isinstance(found, bool):
        raise _refused(f"{where} = {_shown(found)}")
    return int(found)


def _group_size(where: str, found: Any) -> int:
    """0 for all inputs, which is written as −1."""
    if type(found) is not int or (found not in _SIZES and found != -1):
        raise _refused(f"{where} = {_shown(found)}")
    return max(found, 0)


def _block(where: str, found: Any) -> tuple[int, int]:
    sizes = found.split("x") if isinstance(found, str) else found
    if isinstance(sizes, Sequence) and len(sizes) == 2 and all(map(_is_size, sizes)):
        return int(sizes[0]), int(sizes[1])
    raise _refused(f"{where} = {_shown(found)}")


def _is_size(one: Any) -> bool:
    if isinstance(one, str):  # int() raises ValueError for more than 4,300 digits
        return one.isdecimal() and len(one) <= 10 and int(one) in _SIZES
    return type(one) is int and one in _SIZES


def _check(where: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if found.get(key) != value:
            raise _refused(f"{where}.{key} = {_shown(found.get(key))}")


def _refuse(where: str, found: Mapping[str, Any], *keys: str) -> None:
    """Refuse the keys that are set: they change what the weights mean, or what is computed with them."""
    for key in keys:
        if found.get(key):
            raise _refused(f"{where}.{key} = {_shown(found[key])}")


def _shown(value: Any) -> str:
    return _SHORT.repr(value)


def _name(key: Any) -> str:
    """A name from config.json for an error: unchanged if it is short and printable."""
    text = str(key)
    return text if len(text) <= _SHORT.maxstring and text.isprintable() else _shown(text)


def _refused(what: str) -> ModelError:
    read = "; ".join(one.title for name, one in FORMATS.items() if name)
    return ModelError(
        f"{_FIELD}: {what} is not supported; supported: {read}; or the unquantised checkpoint with quantization int8",
        field=_FIELD,
    )
