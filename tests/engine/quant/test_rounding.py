"""Unquantised checkpoints that are rounded to 4 bits or FP8 while they are loaded: which numbers, in any share, served."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import ConfigError, ModelError
from engine import build
from engine.model.config import ModelConfig
from engine.ops.codes import FP8, NIBBLES
from engine.ops.cpu.products import bf16, nibbles
from engine.quant import coded, formats, stored
from engine.request import EngineRequest, SamplingParams
from tests.engine.ranks import engine_of, run, runners
from tests.engine.rounded_checkpoints import GROUP, HOW, reference_of, rounded
from tests.engine.stored_formats import GOLDEN, Tensors, whole
from worker.model_id import make_model_id

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = [5 + 3 * i % 50 for i in range(40)]


def format_of(how: str) -> formats.StoredFormat:
    found = formats.of_matrices(None, how)
    assert found is not None
    return found


def weights(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs))


def read(weight: Tensor, how: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
    outputs, inputs = weight.shape
    share = stored.Matrix("m", outputs, inputs, rows or slice(0, outputs), columns or slice(0, inputs))
    return stored.read(format_of(how), Tensors({"m.weight": weight}), share, torch.float32)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("shape", [(3, 32), (150, 128), (7, 320)])
def test_numbers_are_those_of_the_definition(how, shape):
    weight = weights(*shape)
    assert torch.equal(read(weight, how), rounded(weight, how))
    assert torch.equal(read(weight.bfloat16(), how), rounded(weight.bfloat16(), how))


@pytest.mark.parametrize(("how", "most"), [("int4", 1 / 8), ("fp8", 1 / 16)])
def test_a_number_moves_little_and_the_largest_of_a_group_not_at_all(how, most):
    weight = weights(9, 4 * GROUP)
    groups, found = (one.view(9, -1, GROUP) for one in (weight, read(weight, how)))
    largest = groups.abs().amax(2, keepdim=True)
    bound = largest if how == "int4" else groups.abs() + largest / 448
    assert bool(((found - groups).abs() <= most * bound * 1.0001).all())
    at = groups.abs().argmax(2, keepdim=True)
    torch.testing.assert_close(found.gather(2, at), groups.gather(2, at), rtol=1e-6, atol=0)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "columns", [slice(0, 160), slice(160, 320), slice(128, 256), slice(130, 140), slice(300, 320)]
)
def test_a_share_has_the_numbers_of_the_whole(how, columns):
    weight = weights(20, 320)
    part = read(weight, how, slice(3, 11), columns)
    assert torch.equal(part, read(weight, how)[3:11, columns])


@pytest.mark.parametrize("how", HOW)
def test_groups_of_zeros_and_of_tiny_numbers_are_zeros(how):
    weight = weights(2, 2 * GROUP)
    weight[0, :GROUP], weight[1, GROUP:] = 0.0, 1e-38
    found = read(weight, how)
    assert not found[0, :GROUP].any() and not found[1, GROUP:].any()
    assert torch.equal(found[0, GROUP:], rounded(weight[:1, GROUP:], how)[0])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name(how, number):
    weight = weights(2, GROUP)
    weight[1, 5] = number
    tensors = Tensors({"m.weight": weight})
    assert stored.read_coded(format_of(how), tensors, whole(2, GROUP), coded.ON_CUDA.kinds) is None
    with pytest.raises(ModelError, match=r"matrix m: .*not finite"):
        stored.read(format_of(how), tensors, whole(2, GROUP), torch.float32)


@pytest.mark.parametrize(("how", "kind"), [("int4", NIBBLES), ("fp8", FP8)])
def test_codes_that_kernels_read_stand_for_the_same_numbers(how, kind):
    weight = weights(40, 3 * GROUP)
    found = stored.read_coded(
        format_of(how), Tensors({"m.weight": weight}), whole(*weight.shape), coded.ON_CUDA.kinds
    )
    assert found is not None and (found.kind, found.group) == (kind, GROUP)
    assert torch.equal(found.expanded(torch.float32), rounded(weight, how))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("variant", ["llama", "llama-mqa-tied", "phi3-long-factors"])
def test_tokens_are_those_of_a_checkpoint_of_rounded_numbers(how, variant, checkpoint, tmp_path):
    """With one rank and two; the output head stays as it is, also where it is the embedding."""
    model = checkpoint(variant)
    expected = None
    for path, size, quantization in (
        (reference_of(model, how, tmp_path / "reference"), 1, "auto"),
        (model, 1, how),
        (model, 2, how),
    ):
        with runners(path, size, quantization=quantization) as ranks:
            outputs = run(engine_of(ranks[0]), EngineRequest("r", PROMPT, GREEDY))
        expected = expected or outputs.tokens["r", 0]
        assert outputs.tokens["r", 0] == expected, (size, quantization)
    with runners(model, 1) as ranks:
        plain = run(engine_of(ranks[0]), EngineRequest("r", PROMPT, GREEDY)).tokens["r", 0]
    assert plain != expected, "rounding shows in these tokens"


@pytest.mark.skipif(not bf16.has_instruction(), reason="this CPU has no AVX512-BF16")
def test_a_cpu_keeps_the_four_bits(checkpoint):
    lines: list[str] = []
    model = checkpoint("llama")
    config = EngineConfig(model=model, dtype="bfloat16", quantization="int4", kv_memory_bytes=1 << 20)
    loaded = build.load_model(config, tell=lines.append)
    assert all(type(one.output).__name__ == "NibbleLinear" for one in loaded.decoder.layers)
    assert "rounded to int4" in lines[0]


@pytest.mark.parametrize(("how", "bytes_"), [("int4", 0.5), ("fp8", 1.0)])
def test_weights_are_counted_with_their_scales_where_codes_are_kept(how, bytes_, describe_model, monkeypatch):
    monkeypatch.setattr(nibbles, "supported", lambda: True)
    config = EngineConfig(model=describe_model, dtype="bfloat16", quantization=how, attention_backend="cpu")
    model = ModelConfig.read(describe_model)
    plain = build.weight_bytes(model, config.model_copy(update={"quantization": "auto"}))
    on_cpu = build.weight_bytes(model, config)
    on_cuda = build.weight_bytes(model, config.model_copy(update={"attention_backend": "triton"}))
    matrices = (4 * 256 * 256 + 3 * 256 * 512) * model.num_layers
    beside = 4 if how == "fp8" else 5
    assert plain - on_cuda == matrices * 2 - int(matrices * (bytes_ + beside / GROUP))
    assert plain - on_cpu == (matrices * 2 - int(matrices * (0.5 + 4 / GROUP)) if how == "int4" else 0)


@pytest.fixture
def describe_model(tmp_path, checkpoint):
    raw = json.loads((checkpoint("llama") / "config.json").read_text())
    raw |= {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    raw["head_dim"] = 64
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_that_end_short_are_kept_and_counted_and_ranks_cut_them(ranks, describe_model, monkeypatch):
    """hidden_size 320 has a last group of 64; half of the heads' 256 and of 448 inner inputs ends where no group does."""
    raw = json.loads((describe_model / "config.json").read_text())
    raw |= {"hidden_size": 320, "intermediate_size": 448}
    (describe_model / "config.json").write_text(json.dumps(raw))
    monkeypatch.setattr(nibbles, "supported", lambda: True)
    model = ModelConfig.read(describe_model)
    config = EngineConfig(
        model=describe_model,
        dtype="bfloat16",
        quantization="int4",
        attention_backend="cpu",
        tensor_parallel=ranks,
    )
    plain = build.weight_bytes(model, config.model_copy(update={"quantization": "auto"}))
    saved = plain - build.weight_bytes(model, config)
    matrices = (4 * 320 * 256 + 3 * 320 * 448) * model.num_layers
    most = matrices * (1.5 - 4 / GROUP)
    assert 0.98 * most < saved <= most if ranks == 1 else saved == 0


def test_a_worker_says_that_rounding_saves_nothing(checkpoint):
    lines: list[str] = []
    config = EngineConfig(
        model=checkpoint("llama"), dtype="float32", quantization="fp8", kv_memory_bytes=1 << 20
    )
    build.load_model(config, tell=lines.append)
    assert "rounded to fp8; no kernel here reads that" in lines[0]


@pytest.mark.parametrize("how", HOW)
def test_a_quantised_checkpoint_is_not_rounded_again(how):
    with pytest.raises(
        ConfigError, match=rf"quantization {how}: it is quantised already \(AWQ.*use auto or int8"
    ) as caught:
        build.check(EngineConfig(model=GOLDEN / "awq", quantization=how))
    assert caught.value.field == "quantization"


@pytest.mark.parametrize("how", HOW)
def test_experts_are_not_rounded(how, checkpoint):
    with pytest.raises(ConfigError, match=f"experts are not supported in {how}"):
        build.check(EngineConfig(model=checkpoint("mixtral"), quantization=how))


def test_each_has_a_model_id(checkpoint):
    model = checkpoint("llama")
    assert len({make_model_id(model, quantization=how) for how in ("auto", "int8", *HOW)}) == 4
