"""int8 checkpoints that other projects' code wrote: read as they were written, served, refused where they do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import ModelError
from engine import build
from engine.build import load_model
from engine.layers.linear import Int8Weight
from engine.model.config import ModelConfig
from engine.model.weights import Checkpoint
from engine.quant.formats import INT8, StoredFormat
from engine.request import EngineRequest
from tests.engine.quant.int8_reference import GREEDY, assert_reference
from tests.engine.ranks import KV_BYTES, engine_of, run, runners
from tests.harness import fake_quant
from tests.harness.checkpoints import prompt_ids

GOLDEN = Path(__file__).parents[1] / "golden" / "int8"


def stored(path: Path, **changes: object) -> Path:
    """A copy of the checkpoint that compressed-tensors wrote, with its quantization_config changed."""
    shutil.copytree(GOLDEN, path, dirs_exist_ok=True)
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(raw))
    return path


def test_weights_are_read_as_their_writer_reads_them() -> None:
    read_back = load_file(GOLDEN / "read_back.st")
    assert len(read_back) == 14
    checkpoint = Checkpoint(GOLDEN, torch.bfloat16, torch.device("cpu"), quantization=StoredFormat(INT8))
    for name, expected in read_back.items():
        found = checkpoint.matrix(name, *expected.shape)
        assert isinstance(found, Int8Weight)
        assert torch.equal((found.codes * found.scales[:, None]).to(expected.dtype), expected)
        half = slice(expected.shape[1] // 2, None)
        columns = checkpoint.matrix(name, *expected.shape, columns=half)
        rows = checkpoint.matrix(name, *expected.shape, rows=slice(3, 9))
        assert isinstance(columns, Int8Weight) and isinstance(rows, Int8Weight)
        assert torch.equal(columns.codes, found.codes[:, half]) and torch.equal(columns.scales, found.scales)
        for one in (rows.codes, rows.scales):
            assert one.untyped_storage().nbytes() == one.numel() * one.itemsize, "it keeps the mapping"
        assert torch.equal(rows.codes, found.codes[3:9]) and torch.equal(rows.scales, found.scales[3:9])
    assert isinstance(checkpoint.matrix("lm_head.weight", 64, 32), Tensor)  # it is ignored


@pytest.mark.parametrize("quantization", ["auto", "int8"])
@pytest.mark.parametrize("ranks_", [1, 2])
def test_stored_models_are_those_of_the_reference(quantization, ranks_) -> None:
    prompt = [5 + 3 * i % 50 for i in range(40)]
    with runners(GOLDEN, ranks_, quantization=quantization) as ranks:
        outputs = run(engine_of(ranks[0]), EngineRequest("r", prompt, GREEDY))
    assert_reference(GOLDEN, prompt, outputs.tokens["r", 0], head=quantization == "int8")


@pytest.mark.long
@pytest.mark.parametrize("variant", ["phi4", "glm4"])
@pytest.mark.parametrize("ranks_", [1, 2])
def test_fused_matrices_are_cut_and_reordered_with_their_scales(
    variant, ranks_, checkpoint, tmp_path
) -> None:
    """Queries, keys and values in one tensor, of which a part of each head is rotated; neighbours that are rotated."""
    model = quantised(checkpoint(variant), tmp_path)
    prompt = prompt_ids(40)
    with runners(model, ranks_) as ranks:
        assert ranks[0].model_config.quantization and ranks[0].model_config.dim_order()
        outputs = run(engine_of(ranks[0]), EngineRequest("r", prompt, GREEDY))
    assert_reference(model, prompt, outputs.tokens["r", 0], head=False)


def quantised(model: Path, path: Path) -> Path:
    """The checkpoint with its matrices stored as compressed-tensors stores them."""
    shutil.copytree(model, path, dirs_exist_ok=True)
    tensors = load_file(path / "model.safetensors")
    for name in [one for one in tensors if one.endswith("_proj.weight")]:
        codes, scales = fake_quant.quantize(tensors[name])
        tensors |= {name: codes.to(torch.int8), f"{name}_scale": scales}
    save_file(tensors, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = json.loads((GOLDEN / "config.json").read_text())["quantization_config"]
    (path / "config.json").write_text(json.dumps(raw))
    return path


def test_a_stored_model_takes_what_its_codes_take() -> None:
    model = ModelConfig.read(GOLDEN)
    config = EngineConfig(model=GOLDEN, dtype="bfloat16")
    tensors = load_file(GOLDEN / "model.safetensors")
    found = sum(one.numel() * one.itemsize for name, one in tensors.items() if not name.endswith("_scale"))
    outputs = sum(len(one) for name, one in tensors.items() if name.endswith("_scale"))
    assert build.weight_bytes(model, config) == found + 12 * outputs - 2 * 32  # the last norm


GROUP = json.loads((GOLDEN / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]


def group(part: str, **changes: object) -> dict[str, object]:
    return {"config_groups": {"group_0": GROUP | {part: GROUP[part] | changes}}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quant_method": "fbgemm_fp8"}, r"FP8 \(FBGEMM\) is not supported"),
        ({"quant_method": "new"}, "quant_method 'new' is not supported"),
        ({"format": "nvfp4-pack-quantized"}, "NVFP4, compressed-tensors' format 'nvfp4-pack-quantized'"),
        ({"format": "mixed-precision"}, "format 'mixed-precision'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"config_groups": {}}, "without config_groups"),
        ({"config_groups": {"group_0": 3}}, "config_groups"),
        (group("weights", strategy="group"), r"group_0.weights.strategy = 'group'"),
        (group("weights", symmetric=False), r"group_0.weights.symmetric = False"),
        (group("weights", num_bits=4), r"group_0.weights.num_bits = 4"),
        (group("input_activations", dynamic=False), r"group_0.input_activations.dynamic = False"),
        (group("input_activations", strategy="tensor"), r"group_0.input_activations.strategy = 'tensor'"),
        (
            {"config_groups": {"g": GROUP | {"input_activations": None}}},
            "g.input_activations.num_bits = None",
        ),
    ],
)
def test_other_formats_are_refused_by_name(changes, says, tmp_path) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        ModelConfig.read(stored(tmp_path, **changes))
    assert caught.value.field == "quantization_config"
    assert "supported: compressed-tensors: int8" in caught.value.message


def rewritten(path: Path, name: str, tensor: Tensor | None) -> Path:
    stored(path)
    tensors = load_file(path / "model.safetensors")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("q_proj.weight_scale", None, "stored as torch.int8, expected floating point"),
        ("q_proj.weight", torch.zeros(32, 32), "stored as torch.float32, expected int8"),
        ("q_proj.weight_scale", torch.zeros(32), r"shape \(32,\), expected \(32, 1\)"),
        ("q_proj.weight_scale", torch.ones(32, 1).int(), "stored as torch.int32, expected floating point"),
        ("q_proj.weight", torch.zeros(32, 8, dtype=torch.int8), r"shape \(32, 8\)"),
    ],
)
def test_a_stored_matrix_that_does_not_fit_is_named(name, tensor, says, tmp_path) -> None:
    whole = f"model.layers.1.self_attn.{name}"
    model = rewritten(tmp_path, whole, tensor)
    with pytest.raises(ModelError, match=says) as caught:
        load_model(EngineConfig(model=model, dtype="float32", kv_memory_bytes=KV_BYTES))
    assert caught.value.field.startswith("model.layers.1.self_attn.q_proj.weight")


def test_matrices_of_one_product_are_stored_alike(tmp_path) -> None:
    stored(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_proj.weight_scale"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(16, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="some of its matrices are stored as int8 and others are not"):
        load_model(EngineConfig(model=tmp_path, dtype="float32", kv_memory_bytes=KV_BYTES))
