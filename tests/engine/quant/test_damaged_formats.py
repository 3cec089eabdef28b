"""Quantised checkpoints with wrong or unsupported settings and tensors: refused by name, or read as their writer reads
them."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.weights import Checkpoint
from engine.quant import stored
from engine.quant.formats import AWQ, FP8, FP8_BLOCKS, GPTQ, MXFP4, PACKED, StoredFormat
from tests.engine.stored_formats import (
    DOWN,
    GOLDEN,
    Tensors,
    changed,
    checkpoint_of,
    expanded,
    group_of,
    matrices,
    whole,
)
from worker.model_id import make_model_id

FLOAT = torch.float32


def rewritten(name: str, path: Path, **tensors: Tensor) -> Checkpoint:
    """The golden checkpoint with other tensors of one matrix."""
    model = changed(name, path)
    found = load_file(model / "model.safetensors")
    save_file(found | {f"{DOWN}.{key}": one for key, one in tensors.items()}, model / "model.safetensors")
    return checkpoint_of(model)


# --- formats that are not read ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("fp8-deepseek", {"fmt": "e5m2"}, r"fp8.fmt = 'e5m2'"),
        ("fp8-deepseek", {"expert_dtype": "fp4"}, "fp8.expert_dtype = 'fp4'"),
        ("fp8-deepseek", {"weight_block_size": [1, 32]}, "MXFP8"),
        ("fp8-deepseek", {"weight_block_size": [128]}, "weight_block_size"),
        ("fp8-deepseek", {"weight_block_size": [0, 128]}, "weight_block_size"),
        ("fp8-deepseek", {"modules_to_convert": ["embed_tokens"]}, "modules_to_convert"),
        ("awq", {"version": "gemv"}, "AWQ's packing 'gemv'"),
        ("awq", {"bits": 3}, "awq.bits = 3"),
        ("awq", {"zero_point": False}, "without zero points"),
        ("awq", {"group_size": 0}, "awq.group_size = 0"),
        ("gptq-8", {"bits": 3}, "gptq.bits = 3"),
        ("gptq-8", {"checkpoint_format": "marlin"}, "format 'marlin'"),
        ("gptq-8", {"dynamic": {"-:.*down.*": {}}}, "dynamic"),
        ("w4a16", group_of("w4a16", "weights", num_bits=3), "g.weights.num_bits = 3"),
        ("w4a16", group_of("w4a16", "weights", strategy="tensor"), "g.weights.strategy = 'tensor'"),
        ("w4a16", group_of("w4a16", "weights", group_size=None), "g.weights.group_size = None"),
        ("w4a16", group_of("w4a16", "input_activations", num_bits=8), "g.input_activations"),
        ("fp8-channel", group_of("fp8-channel", "weights", symmetric=False), "g.weights.symmetric = False"),
        ("fp8-channel", group_of("fp8-channel", "weights", strategy="group"), "strategy = 'group'"),
        ("fp8-channel", group_of("fp8-channel", "input_activations", type="int"), "type = 'int'"),
        ("fp8-block", group_of("fp8-block", "weights", block_structure=None), "block_structure = None"),
        ("mxfp4", group_of("mxfp4", "weights", group_size=16), "g.weights.group_size = 16"),
        ("mxfp4", group_of("mxfp4", "input_activations", num_bits=4), "with MXFP4 weights"),
    ],
)
def test_what_is_not_read_is_refused_from_config_json(name, changes, says, tmp_path) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        ModelConfig.read(changed(name, tmp_path, **changes))
    assert caught.value.field == "quantization_config"


def test_groups_that_differ_are_refused(tmp_path) -> None:
    groups = {
        "a": group_of("w4a16", "weights")["config_groups"]["g"],  # type: ignore[index]
        "b": group_of("w4a16", "weights", num_bits=8)["config_groups"]["g"],  # type: ignore[index]
    }
    with pytest.raises(ModelError, match="config_groups whose weights differ"):
        ModelConfig.read(changed("w4a16", tmp_path, config_groups=groups))


@pytest.mark.parametrize(
    ("name", "tensor", "value", "says"),
    [
        ("fp8-block", "weight_scale", torch.ones(2, 2), r"\(2, 2\), expected \(2, 3\) for a matrix of 64 × 96 in b"),
        ("fp8-tensor", "weight_scale", torch.ones(2), r"\(2,\), expected \(1,\)"),
        ("fp8-channel", "weight_scale", torch.ones(32, 1), r"\(32, 1\), expected \(64, 1\)"),
        ("fp8-channel", "weight", torch.zeros(64, 96), "stored as torch.float32, expected float8_e4m3fn"),
        ("fp8-channel", "weight_scale", None, "stored as torch.float8_e4m3fn, expected floating point of 16"),
        ("w4a16", "weight_scale", torch.ones(64, 2), r"\(64, 2\), expected \(64, 3\) for a matrix of 64 × 96"),
        ("w4a16", "weight_shape", torch.tensor([64, 88]), r"stands for a matrix of \[64, 88\]"),
        ("w4a16", "weight_packed", torch.zeros(64, 12), r"stored as torch.float32, expected int32"),
        ("w4a16-asymmetric", "weight_zero_point", None, "weight_zero_point is missing"),
        ("awq", "scales", torch.ones(2, 64), r"\(2, 64\), expected \(3, 64\) for a matrix of 64 × 96 in groups"),
        ("awq", "qzeros", None, "qzeros is missing"),
        ("gptq-act-order", "g_idx", torch.full((96,), 3), "names groups 3 to 3, expected 0 to 2"),
        ("gptq-act-order", "qweight", torch.zeros(12, 8), r"\(12, 8\), expected \(12, 64\)"),
        ("mxfp4", "weight_scale", torch.ones(64, 2), r"\(64, 2\), expected \(64, 3\)"),
    ],
)  # fmt: skip
def test_a_matrix_that_does_not_fit_its_scales_is_named(name, tensor, value, says, tmp_path) -> None:
    model = changed(name, tmp_path)
    tensors = load_file(model / "model.safetensors")
    del tensors[f"{DOWN}.{tensor}"]
    if value is not None:
        tensors[f"{DOWN}.{tensor}"] = value.int() if tensor == "g_idx" else value
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError, match=says) as caught:
        checkpoint_of(model).matrix(f"{DOWN}.weight", 64, 96)
    assert caught.value.field.startswith(DOWN)


# --- settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        # GPTQModel's FP8, whose weights are divided by its weight_scale_inv
        ("fp8-deepseek", {"weight_scale_semantics": "inverse"}, "fp8.weight_scale_semantics = 'inverse'"),
        ("fp8-deepseek", {"kv_cache_scheme": "static"}, "fp8.kv_cache_scheme"),
        ("fp8-deepseek", {"weight_block_size": [1 << 31, 128]}, "weight_block_size"),
        ("fp8-deepseek", {"weight_block_size": f"128x{10**30}"}, "weight_block_size"),
        ("fp8-deepseek", {"weight_block_size": f"128x{'9' * 5000}"}, "weight_block_size"),
        ("fp8-deepseek", {"weight_block_size": ["1" * 5000, 128]}, "weight_block_size"),
        # GPTQModel's: inputs of down_proj are rotated when the model runs
        ("gptq-8", {"rotation": "hadamard"}, "gptq.rotation = 'hadamard'"),
        ("gptq-8", {"adapter": {"name": "lora", "rank": 8}}, "gptq.adapter"),
        ("gptq-8", {"is_marlin_format": True}, "gptq.is_marlin_format"),
        ("gptq-8", {"format": "gptq_v2"}, "format 'gptq_v2' with checkpoint_format 'gptq'"),
        ("gptq-8", {"group_size": 1 << 40}, "gptq.group_size = 1099511627776"),
        ("awq", {"rotation": "random"}, "awq.rotation"),
        ("awq", {"adapter": {"name": "lora"}}, "awq.adapter"),
        ("w4a16", group_of("w4a16", "weights", symmetric="false"), "g.weights.symmetric = 'false'"),
        ("w4a16", group_of("w4a16", "weights", group_size=10**30), "g.weights.group_size"),
    ],
)
def test_settings_that_change_the_weights_are_refused(name, changes, says, tmp_path) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        ModelConfig.read(changed(name, tmp_path, **changes))
    assert caught.value.field == "quantization_config"


def test_a_group_in_another_format_is_refused(tmp_path) -> None:
    groups: Any = group_of("w4a16", "weights")["config_groups"]
    groups["g"]["format"] = "pack-quantized"
    assert ModelConfig.read(changed("w4a16", tmp_path, config_groups=groups)).quantization is not None
    groups["g"]["format"] = "int-quantized"
    with pytest.raises(ModelError, match=r"g\.format = 'int-quantized' in format 'pack-quantized'"):
        ModelConfig.read(changed("w4a16", tmp_path, config_groups=groups))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("w4a16", {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}}),
        ("fp8-deepseek", {"fmt": "float8_e4m3fn"}),
        ("gptq-8", {"format": "gptq", "rotation": None, "adapter": None}),
        # Which matrices are quantised is read off the tensors: patterns of the file are never compiled
        ("w4a16", {"ignore": ["re:(a+)+$", "re:((("]}),
        ("fp8-deepseek", {"modules_to_not_convert": ["re:(x+x+)+y", "["]}),
    ],
)
def test_settings_that_change_nothing_are_read(name, changes, tmp_path) -> None:
    plain = ModelConfig.read(GOLDEN / name).quantization
    assert ModelConfig.read(changed(name, tmp_path, **changes)).quantization == plain


@pytest.mark.parametrize(
    "value",
    [
        "x" * 5_000_000,
        {"quant_method": "y" * 5_000_000},
        {"quant_method": "modelopt", "quant_algo": "z\n" * 5_000_000},
        {"format": "pack-quantized", "config_groups": {"z\x1b[2J" * 1_000_000: 1}},
        {"quant_method": "gptq", "bits": list(range(1_000_000))},
    ],
)
def test_what_a_file_says_is_cut_in_an_error(value, tmp_path) -> None:
    path = tmp_path / "config.json"
    raw = json.loads((GOLDEN / "awq" / "config.json").read_text())
    path.write_text(json.dumps(raw | {"quantization_config": value}))
    with pytest.raises(ModelError) as caught:
        ModelConfig.read(tmp_path)
    assert len(str(caught.value)) < 2000
    assert str(caught.value).isprintable()


def test_brackets_of_any_depth_have_an_id_or_are_refused(tmp_path) -> None:
    """Also at depths that json can read, but not write."""
    model = changed("w4a16", tmp_path, ignore="HERE")
    plain = (model / "config.json").read_text()
    ids = set()
    for depth in range(850, 1001):
        (model / "config.json").write_text(plain.replace('"HERE"', "[" * depth + "]" * depth))
        with contextlib.suppress(ModelError):
            ids.add(make_model_id(model))
    assert 0 < len(ids) < 151


# --- tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensors", "says"),
    [
        ("fp8-block", {"weight_scale_inv": torch.ones(2, 3)}, "a matrix has one of them"),
        ("fp8-block", {"weight_scale": torch.ones(2, 3).int()}, "stored as torch.int32, expected floating point"),
        ("w4a16", {"weight_scale": torch.ones(64, 3).bool()}, "stored as torch.bool, expected floating point"),
        ("awq", {"scales": torch.ones(3, 64).int()}, "stored as torch.int32, expected floating point"),
        ("gptq-act-order", {"scales": torch.ones(3, 64).int()}, "torch.int32, expected floating point"),
        ("gptq-act-order", {"g_idx": torch.zeros(96)}, "stored as torch.float32, expected int32"),
        ("gptq-act-order", {"g_idx": torch.arange(96).int() // 32 - 1}, "names groups -1 to 1"),
        ("gptq-act-order", {"g_idx": torch.full((96,), -1, dtype=torch.int32)}, "names groups -1 to -1"),
        ("mxfp4", {"weight_scale": torch.ones(64, 3).to(torch.float8_e4m3fn)}, "expected uint8"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_what_they_should_be_are_named(name, tensors, says, tmp_path) -> None:
    checkpoint = rewritten(name, tmp_path, **tensors)
    with pytest.raises(ModelError, match=says) as caught:
        checkpoint.matrix(f"{DOWN}.weight", 64, 96)
    assert caught.value.field.startswith(DOWN)


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e38])
@pytest.mark.parametrize(
    ("name", "scale", "shape"),
    [("fp8-block", "weight_scale", (2, 3)), ("w4a16", "weight_scale", (64, 3)), ("awq", "scales", (3, 64)),
     ("gptq-act-order", "scales", (3, 64))],
)  # fmt: skip
def test_weights_that_are_not_finite_are_refused(name, scale, shape, number, tmp_path) -> None:
    scales = torch.ones(shape)
    scales[1, 1] = number
    checkpoint = rewritten(name, tmp_path, **{scale: scales})
    with pytest.raises(ModelError, match=f"matrix {DOWN}: its codes and scales .* not finite") as caught:
        checkpoint.matrix(f"{DOWN}.weight", 64, 96)
    assert caught.value.field == DOWN


def test_a_scale_of_mxfp4_that_is_no_number_is_refused(tmp_path) -> None:
    scales = torch.full((64, 3), 127, dtype=torch.uint8)
    scales[63, 2] = 255
    checkpoint = rewritten("mxfp4", tmp_path, weight_scale=scales)
    with pytest.raises(ModelError, match="not finite"):
        checkpoint.matrix(f"{DOWN}.weight", 64, 96)


def test_a_scale_of_int8_that_is_no_number_is_refused() -> None:
    tensors = Tensors({"m.weight": torch.ones(8, 4).char(), "m.weight_scale": torch.full((8, 1), math.nan)})
    with pytest.raises(ModelError, match="not finite") as caught:
        stored.read_int8(tensors, whole(8, 4))
    assert caught.value.field == "m.weight_scale"


def test_large_weights_whose_sum_is_infinite_are_read() -> None:
    tensors = Tensors(
        {"m.weight": torch.ones(8, 4).to(torch.float8_e4m3fn), "m.weight_scale": torch.tensor(1e38)}
    )
    assert torch.equal(
        stored.read(StoredFormat(FP8, (0, 0)), tensors, whole(8, 4), FLOAT), torch.full((8, 4), 1e38)
    )


def test_an_order_that_was_not_filled_is_that_of_the_columns(tmp_path) -> None:
    """compressed-tensors begins with −1 everywhere, and takes it for no order."""
    checkpoint = rewritten("w4a16", tmp_path, weight_g_idx=torch.full((96,), -1, dtype=torch.int32))
    expected = matrices("w4a16")[f"{DOWN}.weight"]
    assert torch.equal(expanded(checkpoint, f"{DOWN}.weight", 64, 96), expected)
    half = expanded(checkpoint, f"{DOWN}.weight", 64, 96, columns=slice(48, 96))
    assert torch.equal(half, expected[:, 48:])


def test_every_rank_refuses_a_wrong_order(tmp_path) -> None:
    """Also a rank whose own inputs are all in groups that exist."""
    order = torch.zeros(96, dtype=torch.int32)
    order[95] = 3
    checkpoint = rewritten("gptq-act-order", tmp_path, g_idx=order)
    with pytest.raises(ModelError, match="names groups 0 to 3"):
        checkpoint.matrix(f"{DOWN}.weight", 64, 96, columns=slice(0, 48))


@pytest.mark.parametrize("form", [FP8, FP8_BLOCKS, PACKED, AWQ, GPTQ, MXFP4])
def test_nothing_is_allocated_for_inputs_that_the_file_does_not_have(form) -> None:
    class Small(Tensors):
        def part(self, name: str, shape: tuple[int, ...], *parts: slice | int, why: str = "") -> Tensor:
            raise ModelError("another shape", field=name)

    names = ("weight_scale", "weight_packed", "qweight")
    tensors = Small({f"m.{name}": torch.zeros(1) for name in names})
    with pytest.raises(ModelError, match="another shape"):
        stored.read(StoredFormat(form, (1, 32), 4), tensors, whole(8, 1 << 50), FLOAT)


# --- numbers -----------------------------------------------------------------------------------------


def e4m3(code: int) -> float:
    """By its definition (FP8 Formats for Deep Learning, table 1)."""
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if not exponent else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_every_code_of_fp8_has_its_number() -> None:
    codes = [code for code in range(256) if code & 127 != 127] + [0, 0]  # the other two are NaN
    tensors = Tensors(
        {
            "m.weight": torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).view(8, 32),
            # as DeepSeek's later models store scales: exponents alone
            "m.weight_scale_inv": torch.tensor([[124]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
        }
    )
    found = stored.read(StoredFormat(FP8_BLOCKS, (8, 32)), tensors, whole(8, 32), FLOAT).flatten()
    assert torch.equal(found, torch.tensor([e4m3(code) / 8 for code in codes]))


def test_every_scale_of_mxfp4_is_its_power_of_two() -> None:
    """2^(e − 127), down to numbers that are subnormal; 255 is not a number."""
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1)
    tensors = Tensors(
        {"m.weight_packed": torch.full((255, 16), 0x2A, dtype=torch.uint8), "m.weight_scale": scales}
    )
    found = stored.read(StoredFormat(MXFP4, (1, 32), 4), tensors, whole(255, 32), FLOAT)
    expected = torch.tensor([2.0 ** (e - 127) for e in range(255)])
    assert torch.equal(found[:, ::2], -expected[:, None].expand(-1, 16))
    assert torch.equal(found[:, 1::2], expected[:, None].expand(-1, 16))


@pytest.mark.parametrize("rows", [slice(0, 40), slice(17, 39)])
@pytest.mark.parametrize("columns", [slice(0, 72), slice(40, 71)])
def test_blocks_that_the_edges_of_a_matrix_cut(rows, columns) -> None:
    weight = torch.randn(40, 72, generator=torch.Generator().manual_seed(4)).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=torch.Generator().manual_seed(5))
    spread = scales.repeat_interleave(32, 0)[:40].repeat_interleave(32, 1)[:, :72]
    tensors = Tensors({"m.weight": weight, "m.weight_scale_inv": scales})
    share = stored.Matrix("m", 40, 72, rows, columns)
    found = stored.read(StoredFormat(FP8_BLOCKS, (32, 32)), tensors, share, FLOAT)
    assert torch.equal(found, (weight.float() * spread)[rows, columns])
