"""Products with quantised weights against plain arithmetic. Run by test_interpreted.py, where Triton interprets kernels."""

from __future__ import annotations

import math

import pytest
import torch

from engine.ops import triton_int8
from engine.quant import int8
from engine.quant.int8 import CudaInt8, TorchInt8
from tests.harness import fake_quant

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
    codes, scales = triton_int8.quantize(x, -(-width // 16) * 16, largest)
    expected, of_rows = fake_quant.quantize(x, largest)
    assert torch.equal(codes[:, :width].double(), expected) and not codes[:, width:].any()
    assert torch.equal(scales, of_rows[:, 0])
    if not given:
        x[3, 5], x[4, 5], x[5, 5] = math.nan, math.inf, -math.inf
        scales = triton_int8.quantize(x, -(-width // 16) * 16)[1]
        assert not scales[3:].isfinite().any() and scales[:3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_int8_products_are_torchs(biased, dtype):
    """To the last bit, but for bf16, which the interpreter does not round: one row, and rows, outputs and inputs that fill
    no tile."""
    torch.manual_seed(0)
    outputs, inputs = 75, 300
    weight = torch.randn(outputs, inputs).to(dtype)
    packed = int8.quantize_weight(weight, int8.largest_of(weight))
    bias = torch.randn(outputs).to(dtype) if biased else None
    own, plain = CudaInt8(packed, bias, None), TorchInt8(packed, bias, None)
    x = torch.randn(150, inputs).to(dtype)
    for rows in (0, 1, 2, 17, 65, 150):
        got, expected = own(x[:rows]), plain(x[:rows])
        assert got.dtype is dtype
        torch.testing.assert_close(got, expected, atol=0, rtol=0 if dtype is torch.float32 else 8e-3)
