"""Quantised checkpoints that other projects' code wrote: read to the last bit, whole and in shares, and served."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.config.worker import EngineConfig
from engine import build
from engine.layers.linear import join
from engine.model.config import ModelConfig
from engine.model.layer_weights import LayerWeights
from engine.model.weights import Checkpoint
from engine.ops.codes import NIBBLES, CodedWeight
from engine.ops.cpu.products import bf16, nibbles
from engine.quant import coded, expand, formats, stored
from engine.quant.formats import FORMATS
from engine.request import EngineRequest, SamplingParams
from tests.engine.ranks import engine_of, run, runners
from tests.engine.stored_formats import (
    GOLDEN,
    SHAPES,
    Tensors,
    changed,
    checkpoint_of,
    expanded,
    matrices,
    whole,
)
from tests.harness.exactness import MAX_TIES
from tests.harness.live_bytes import taken
from worker.model_id import make_model_id

NAMES = sorted(path.name for path in GOLDEN.iterdir())
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = [5 + 3 * i % 50 for i in range(40)]


def digest(matrix: Tensor) -> str:
    """As in golden/make_formats.py."""
    return hashlib.blake2b((matrix.float().contiguous() + 0.0).numpy().tobytes(), digest_size=16).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_matrices_are_those_of_their_writer(name) -> None:
    expected = json.loads((GOLDEN / name / "digests.json").read_text())
    assert {tensor: digest(matrix) for tensor, matrix in matrices(name).items()} == expected
    assert len(expected) == 7


@pytest.mark.parametrize("name", NAMES)
def test_shares_are_cut_anywhere(name) -> None:
    """In the middle of words, groups and blocks too; in bf16 the whole is rounded once."""
    whole = matrices(name)
    checkpoint, rounded = checkpoint_of(GOLDEN / name), checkpoint_of(GOLDEN / name, torch.bfloat16)
    for part in ("self_attn.k_proj", "mlp.down_proj"):
        tensor, shape = f"model.layers.0.{part}.weight", SHAPES[part]
        for cut in (slice(0, 16), slice(5, 27), slice(31, 32), slice(21, shape[0] - 1)):
            assert torch.equal(expanded(checkpoint, tensor, *shape, rows=cut), whole[tensor][cut])
        for cut in (slice(0, 48), slice(33, 63), slice(shape[1] - 3, shape[1]), slice(21, shape[1] - 1)):
            assert torch.equal(expanded(checkpoint, tensor, *shape, columns=cut), whole[tensor][:, cut])
        assert torch.equal(expanded(rounded, tensor, *shape), whole[tensor].bfloat16())


@functools.cache
def reference(name: str) -> Any:
    """Hugging Face's model in fp32, of the matrices that the first test compares with their writer's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    raw = json.loads((GOLDEN / name / "config.json").read_text())
    del raw["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**raw)).float().eval()
    wanted = set(model.state_dict())
    tensors = load_file(GOLDEN / name / "model.safetensors")
    plain = {key: one.float() for key, one in tensors.items() if key in wanted}
    model.load_state_dict(plain | matrices(name))
    return model


@torch.inference_mode()
def assert_reference(name: str, tokens: list[int]) -> None:
    logits = reference(name)(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    behind = logits.amax(-1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert behind.max() < 1e-4, behind.tolist()
    assert (behind == 0).sum() >= len(tokens) - MAX_TIES


RANKS = [1, pytest.param(2, marks=pytest.mark.long)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", RANKS)
def test_tokens_are_those_of_the_expanded_weights(name, size) -> None:
    """Two ranks cut the groups and blocks of 32 of `down_proj` at 48."""
    with runners(GOLDEN / name, size) as ranks:
        outputs = run(engine_of(ranks[0]), EngineRequest("r", PROMPT, GREEDY))
    assert_reference(name, outputs.tokens["r", 0])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_they_are_served_as_int8_too(name) -> None:
    with runners(GOLDEN / name, 1, quantization="int8") as ranks:
        outputs = run(engine_of(ranks[0]), EngineRequest("r", PROMPT, GREEDY))
    assert len(outputs.tokens["r", 0]) == GREEDY.max_tokens


# --- kept in their codes -------------------------------------------------------------------

EXPANDED = {"gptq-act-order", "w4a16-act-order", "mxfp4"}


def coded_of(path: Path) -> Checkpoint:
    how = ModelConfig.read(path).quantization
    return Checkpoint(path, torch.bfloat16, torch.device("cpu"), quantization=how, kinds=coded.ON_CUDA.kinds)


@pytest.mark.parametrize("name", NAMES)
def test_codes_that_are_kept_are_the_same_weights(name) -> None:
    """Also in shares; groups that are cut elsewhere than where they end are expanded."""
    checkpoint = coded_of(GOLDEN / name)
    for part, shape in SHAPES.items():
        tensor, expected = f"model.layers.0.{part}.weight", matrices(name)[f"model.layers.0.{part}.weight"]
        found = checkpoint.matrix(tensor, *shape)
        assert isinstance(found, Tensor) == (name in EXPANDED)
        assert torch.equal(bf16_of(found), expected.bfloat16())
        rows = checkpoint.matrix(tensor, *shape, rows=slice(5, 27))
        assert isinstance(rows, Tensor) == (name in EXPANDED)
        assert torch.equal(bf16_of(rows), expected[5:27].bfloat16())
        for columns in (slice(32, shape[1]), slice(16, 64)):
            share = checkpoint.matrix(tensor, *shape, columns=columns)
            assert torch.equal(bf16_of(share), expected[:, columns].bfloat16())
            if columns.start % 32 == 0:
                assert isinstance(share, Tensor) == (name in EXPANDED)


def bf16_of(weight: object) -> Tensor:
    if isinstance(weight, CodedWeight):
        return weight.expanded(torch.bfloat16)
    assert isinstance(weight, Tensor)
    return weight


@pytest.mark.parametrize("name", NAMES)
def test_codes_that_are_kept_take_what_is_said(name) -> None:
    model = ModelConfig.read(GOLDEN / name)
    config = EngineConfig(model=GOLDEN / name, dtype="bfloat16", attention_backend="triton")
    said = build.weight_bytes(model, config)
    expanded_bytes = build.weight_bytes(model, config.model_copy(update={"attention_backend": "sdpa"}))
    if name in EXPANDED:
        assert said == expanded_bytes
        return
    checkpoint, taken_bytes = coded_of(GOLDEN / name), 2 * (64 * 64 * 2 + 2 * 64)
    for part, shape in SHAPES.items():
        found = checkpoint.matrix(f"model.layers.0.{part}.weight", *shape)
        assert isinstance(found, CodedWeight)
        taken_bytes += sum(one.nbytes for one in (found.codes, found.scales, found.zeros) if one is not None)
    assert said == taken_bytes < expanded_bytes


@pytest.mark.parametrize("name", ["awq", "w4a16", "w4a16-asymmetric"])
def test_panels_of_codes_on_a_cpu_take_what_is_said(name, monkeypatch) -> None:
    """Beside padding to whole panels: all matrices of these checkpoints fill theirs."""
    monkeypatch.setattr(nibbles, "supported", lambda: True)
    model = ModelConfig.read(GOLDEN / name)
    config = EngineConfig(model=GOLDEN / name, dtype="bfloat16", attention_backend="cpu")
    checkpoint, taken_bytes = coded_of(GOLDEN / name), 2 * (64 * 64 * 2 + 2 * 64)
    for part, shape in SHAPES.items():
        found = checkpoint.matrix(f"model.layers.0.{part}.weight", *shape)
        assert isinstance(found, CodedWeight)
        taken_bytes += nibbles.pack(found)[0].nbytes
    assert build.weight_bytes(model, config) == taken_bytes


def test_parts_of_a_product_that_are_stored_otherwise_are_expanded() -> None:
    plain = torch.ones(4, 32).bfloat16()
    kept = CodedWeight(
        NIBBLES, torch.full((2, 16), 0x53).byte(), torch.ones(2, 1), torch.ones(2, 1).byte(), 0
    )
    joined = join("m", [plain, kept])
    assert isinstance(joined, Tensor)
    assert joined[4:].tolist() == [[2.0] * 16 + [4.0] * 16] * 2
    both = join("m", [kept, kept])
    assert isinstance(both, CodedWeight) and both.shape == (4, 32)
    assert torch.equal(both.expanded(torch.bfloat16)[2:], joined[4:])


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("block", [(128, 128), None])
def test_fp8_blocks_are_read_as_transformers_writes_them(scale_fmt, block) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    quantizer = SimpleNamespace(quantization_config=config)
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    writer: Any = Fp8Quantize(quantizer)  # its annotations are wrong
    found = writer.convert({"m.weight": weight})
    expected = Fp8Dequantize(quantizer)._dequantize_one(
        found["m.weight"], found["m.weight_scale_inv"], torch.float32
    )
    how = formats.stored_format(
        {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block}}
    )
    assert how is not None
    assert torch.equal(stored.read(how, Tensors(found), whole(256, 384), torch.float32), expected)


@pytest.mark.parametrize(("bits", "ones"), [(4, 0x11111111), (8, 0x01010101)])
def test_zero_points_of_gptqs_two_formats(bits, ones) -> None:
    """GPTQModel writes the first by subtracting ones from the words of the second, borrowing where a zero point is 0."""
    second = torch.randint(
        -(1 << 31), (1 << 31) - 1, (5, 6), dtype=torch.int32, generator=torch.Generator().manual_seed(3)
    )
    second[0] = 0
    expected = expand.gptq_zeros(second, bits, 0)
    assert torch.equal(expand.gptq_zeros(second - ones, bits, 1), expected)
    assert expected.shape == (5, 6 * 32 // bits)


@pytest.mark.parametrize("variant", ["phi3-window", "glm4"])
@pytest.mark.parametrize("rank", [0, 1])
def test_families_with_fused_matrices_and_heads_in_another_order(variant, rank, checkpoint, tmp_path) -> None:
    """Blocks of 16 × 16 cross the ends of queries, keys and ranks' shares, and the order of a head's dimensions."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = SimpleNamespace(weight_block_size=(16, 16), scale_fmt="float")
    quantizer = SimpleNamespace(quantization_config=config)
    writer: Any = Fp8Quantize(quantizer)  # its annotations are wrong
    reader: Any = Fp8Dequantize(quantizer)
    packed: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(checkpoint(variant) / "model.safetensors").items():
        found = {name: tensor}
        if name.endswith("proj.weight"):
            found = writer.convert({name: tensor})
            assert len(found) == 2, name
            tensor = reader._dequantize_one(*found.values(), torch.float32)
        packed |= found
        plain[name] = tensor
    paths = {"plain": plain, "packed": packed}
    for kind, tensors in paths.items():
        shutil.copytree(checkpoint(variant), tmp_path / kind)
        save_file(tensors, tmp_path / kind / "model.safetensors")
    raw = json.loads((tmp_path / "packed" / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(raw))
    expected, read = (
        LayerWeights(ModelConfig.read(path), checkpoint_of(path), rank, 2)
        for path in (tmp_path / "plain", tmp_path / "packed")
    )
    for part in ("qkv", "gate_up"):
        one, other = getattr(expected, part)("layers.0.")[0], getattr(read, part)("layers.0.")[0]
        assert torch.equal(one, other)
    for part in ("output", "down"):
        one, other = getattr(expected, part)("layers.0."), getattr(read, part)("layers.0.")
        assert torch.equal(one, other)


# --- memory, ids, the table --------------------------------------------------------------------------


def _words(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


OUT, IN, GROUPS = 4096, 256, 256 // 32
TALL = {
    "fp8-block": {"weight": torch.zeros(OUT, IN).to(torch.float8_e4m3fn), "weight_scale": torch.ones(OUT // 32, GROUPS)},
    "w4a16": {"weight_packed": _words(OUT, IN // 8), "weight_scale": torch.ones(OUT, GROUPS)},
    "awq": {
        "qweight": _words(IN, OUT // 8), "qzeros": _words(GROUPS, OUT // 8), "scales": torch.ones(GROUPS, OUT).half(),
    },
    "gptq-act-order": {
        "qweight": _words(IN // 8, OUT), "qzeros": _words(GROUPS, OUT // 8), "scales": torch.ones(GROUPS, OUT).half(),
        "g_idx": _words(IN),
    },
    "mxfp4": {
        "weight_packed": torch.zeros(OUT, IN // 2, dtype=torch.uint8),
        "weight_scale": torch.zeros(OUT, GROUPS, dtype=torch.uint8),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TALL)
def test_a_matrix_is_not_unpacked_at_once(name) -> None:
    """Beside its result and what is stored it takes less than a byte per number."""
    how = ModelConfig.read(GOLDEN / name).quantization
    assert how is not None
    tensors = Tensors({f"m.{key}": tensor for key, tensor in TALL[name].items()})
    share = stored.Matrix("m", OUT, IN, slice(1, OUT), slice(0, IN))
    numbers = (OUT - 1) * IN
    live = taken(lambda: stored.read(how, tensors, share, torch.bfloat16))
    live -= sum(one.nbytes for one in tensors.values())  # parts of them are made by operations too
    assert numbers < live < 2.75 * numbers


@pytest.mark.parametrize("name", NAMES)
def test_weights_take_what_they_are_expanded_to(name) -> None:
    model = ModelConfig.read(GOLDEN / name)
    matrices_ = sum(math.prod(shape) for shape in SHAPES.values())
    beside = 64 * 64 * 2 + 2 * 64  # embedding and head; norms but the last
    for dtype, width in (("bfloat16", 2), ("float32", 4)):
        config = EngineConfig(model=GOLDEN / name, dtype=dtype)  # type: ignore[arg-type]
        assert build.weight_bytes(model, config) == (matrices_ + beside) * width
    assert build.weight_bytes(model, config.model_copy(update={"quantization": "int8"})) < matrices_ * 2


@pytest.mark.parametrize("kept", [True, False])
def test_the_bytes_are_said_before_weights_are_read(kept, monkeypatch) -> None:
    if kept and not bf16.has_instruction():
        pytest.skip("this CPU has no AVX512-BF16")
    monkeypatch.setattr(nibbles, "supported", lambda: kept)
    lines: list[str] = []
    config = EngineConfig(model=GOLDEN / "awq", dtype="bfloat16", kv_memory_bytes=1 << 20)
    build.load_model(config, tell=lines.append)
    said = build.weight_bytes(ModelConfig.read(GOLDEN / "awq"), build.check(config)[1])
    assert lines[0].startswith(f"weights take {said} bytes on each rank, stored as AWQ")
    assert lines[1] == "weights are read"
    assert ("and not expanded" in lines[0], "expanded to bfloat16 while loading" in lines[0]) == (
        kept,
        not kept,
    )


def test_an_id_names_the_form_and_its_settings(tmp_path) -> None:
    plain = make_model_id(GOLDEN / "gptq-8")
    assert make_model_id(changed("gptq-8", tmp_path / "gptq-8")) == plain
    other = changed("gptq-8", tmp_path / "gptq-8", checkpoint_format="gptq_v2")
    assert make_model_id(other) != plain
    assert make_model_id(GOLDEN / "gptq-8", quantization="int8") != plain


def test_every_form_that_is_computed_has_a_golden_checkpoint() -> None:
    rounded = {formats.ROUNDED_INT4, formats.ROUNDED_FP8}
    read = {name for name in FORMATS if name} - rounded
    found = {ModelConfig.read(GOLDEN / name).quantization.name for name in NAMES}  # type: ignore[union-attr]
    assert found | {formats.INT8, formats.MXFP4_EXPERTS} == read  # of those there are tests of their own
