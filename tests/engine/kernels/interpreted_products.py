"""Products with quantised weights against plain arithmetic. Run by test_interpreted.py, where Triton interprets."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from cluster.config.worker import EngineConfig
from engine.attention import registry
from engine.build import load_model
from engine.layers.linear import CodedLinear
from engine.ops.codes import BYTES, FP8, NIBBLES, CodedWeight
from engine.ops.cuda import coded_products, int8_products
from engine.plan import PlanItem, StepPlan
from engine.quant import int8
from engine.quant.int8 import CudaInt8, TorchInt8
from engine.runner import ModelRunner
from tests.harness import fake_quant

IDS = [5 + 3 * i % 50 for i in range(10)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("width", [100, 9000])
def test_rows_are_rounded_as_on_cpus(width, given):
    """Also rows of zeros, of numbers too small to divide by, and with ties; rows that are not finite have such a scale."""
    torch.manual_seed(0)
    x = torch.randn(6, width)
    x[0], x[1], x[2] = 0.0, 1e-35, torch.arange(width) % 200 / 2
    x[2, 0] = 127.0
    largest = x.abs().amax(1) * 1.7 if given else None
    codes, scales = int8_products.quantize(x, -(-width // 16) * 16, largest)
    expected, of_rows = fake_quant.quantize(x, largest)
    assert torch.equal(codes[:, :width].double(), expected) and not codes[:, width:].any()
    assert torch.equal(scales, of_rows[:, 0])
    if not given:
        x[3, 5], x[4, 5], x[5, 5] = math.nan, math.inf, -math.inf
        scales = int8_products.quantize(x, -(-width // 16) * 16)[1]
        assert not scales[3:].isfinite().any() and scales[:3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_int8_products_are_torchs(biased, dtype):
    """To the last bit, but for bf16, which the interpreter does not round: one row, and rows, outputs and inputs that fill
    no tile."""
    torch.manual_seed(0)
    outputs, inputs = 75, 300
    weight = torch.randn(outputs, inputs).to(dtype)
    packed = int8.quantize_weight(weight, int8.row_maxima_of(weight))
    bias = torch.randn(outputs).to(dtype) if biased else None
    own, plain = CudaInt8(packed, bias, None), TorchInt8(packed, bias, None)
    x = torch.randn(150, inputs).to(dtype)
    for rows in (0, 1, 2, 17, 65, 150):
        got, expected = own(x[:rows]), plain(x[:rows])
        assert got.dtype is dtype
        torch.testing.assert_close(got, expected, atol=0, rtol=0 if dtype is torch.float32 else 8e-3)


def coded(kind: str, group: int, outputs: int, inputs: int) -> CodedWeight:
    """Any codes that are numbers; scales of which FP8's are large for its smallest numbers."""
    draw = torch.Generator().manual_seed(len(kind) + group)
    size = inputs // 2 if kind == NIBBLES else inputs
    codes = torch.randint(0, 256, (outputs, size), dtype=torch.uint8, generator=draw)
    groups = -(-inputs // group) if group else 1
    scales = torch.rand(outputs, groups, generator=draw) + 0.5
    if kind == FP8:
        return CodedWeight(kind, torch.where(codes & 0x7F == 0x7F, 1, codes), scales, None, group)
    zeros = torch.randint(0, 16 if kind == NIBBLES else 256, scales.shape, dtype=torch.uint8, generator=draw)
    return CodedWeight(kind, codes, scales, zeros, group)


@pytest.mark.parametrize("group", [0, 32, 128, 96])
@pytest.mark.parametrize("kind", [FP8, BYTES, NIBBLES])
def test_products_with_codes_are_those_of_the_expanded_weights(kind, group):
    """For one row, for tiles, and for so many rows that weights are expanded, two parts at a time; the last group may have
    fewer inputs."""
    torch.manual_seed(0)
    outputs, inputs = 37, 320
    weight, bias = coded(kind, group, outputs, inputs), torch.randn(outputs)
    matrix = weight.expanded(torch.float32)
    assert torch.equal(coded_products.expand(weight, 0, outputs, torch.float32), matrix)
    for added in (bias, None):
        layer = CodedLinear(weight, added)
        for rows in (1, 2, 17, 66, 140) if added is not None else (1, 3, 0):
            x = torch.randn(rows, inputs)
            exact = x.double() @ matrix.double().t() + (0 if added is None else added.double())
            error = (layer(x).double() - exact).abs().max() / exact.abs().max() if rows else layer(x).sum()
            assert float(error) < 1e-6, rows


@pytest.mark.parametrize("name", ["awq"])
def test_an_engine_keeps_the_codes_and_says_the_same(name, monkeypatch):
    monkeypatch.setattr(registry, "choose", lambda name, *others, **more: name)
    path = Path(__file__).resolve().parents[1] / "golden/formats" / name
    found = []
    for backend, dtype in (("triton", "bfloat16"), ("sdpa", "float32")):
        config = EngineConfig(
            model=path, dtype=dtype, attention_backend=backend, kv_memory_bytes=4 << 20, max_model_len=64
        )
        loaded = load_model(config)
        layers = loaded.decoder.layers
        kept = [isinstance(one, CodedLinear) for layer in layers for one in (layer.qkv, layer.output)]
        assert all(kept) if backend == "triton" else not any(kept)
        steps = [(0, 9, [1]), (9, 10, [1])]
        rows = [
            ModelRunner(loaded).execute(StepPlan([PlanItem("r", IDS[a:b], a, blocks, 0, 1)], []))
            for a, b, blocks in steps
        ]
        found.append(torch.cat(rows))
    assert float((found[0] - found[1]).abs().mean() / found[1].abs().mean()) < 0.05


def test_weights_are_expanded_a_part_at_a_time(monkeypatch):
    torch.manual_seed(0)
    weight, x = coded(NIBBLES, 32, 37, 64), torch.randn(140, 64)
    expected = CodedLinear(weight, None)(x)
    monkeypatch.setattr(coded_products, "EXPANDED", 64 * 16)
    # Matrix products of other widths add in another order: float32 sums of 64 terms up to 50 differ in their last bits.
    torch.testing.assert_close(CodedLinear(weight, None)(x), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", [FP8, BYTES, NIBBLES])
def test_products_of_bf16_rows_are_near_the_exact_ones(kind):
    weight, x = coded(kind, 32, 20, 64), torch.randn(3, 64).bfloat16()
    layer, exact = CodedLinear(weight, None), x.double() @ weight.expanded(torch.float32).double().t()
    for rows in (1, 3):
        got = layer(x[:rows])
        assert got.dtype is torch.bfloat16
        assert float((got.double() - exact[:rows]).abs().max() / exact.abs().max()) < 8e-3
