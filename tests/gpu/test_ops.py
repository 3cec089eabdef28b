"""The small kernels on the GPU beside torch's operations, over the same numbers."""

from __future__ import annotations

import pytest
import torch

from engine.ops.base import LayerOps, OpsShape
from engine.ops.torch_ops import TorchOps

pytestmark = pytest.mark.gpu
TOKENS, PAGE = 37, 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("norms", "activation"), [(False, "clamped_swiglu"), (True, "silu")])
@pytest.mark.parametrize("heads", [(4, 2, 32), (32, 8, 128), (14, 2, 64)], ids=str)
def test_the_operations_are_those_of_torch(heads, norms, activation, dtype, device):
    if device != "cuda":
        pytest.skip("kernels for CUDA")
    pytest.importorskip("triton")
    from engine.ops.cuda.ops import TritonOps

    torch.manual_seed(0)
    query, kv, dim = heads
    angles = torch.rand(200, dim // 2, device=device) * 6
    cache = torch.zeros(9, 2, 2, kv, PAGE, dim, device=device, dtype=dtype)
    caches = [cache, cache.clone()]
    how = (OpsShape(query, kv, dim, 1e-5, activation, (), 1.702, 1.5), angles.cos(), angles.sin())
    ops: list[LayerOps] = [TorchOps(*how, caches[0]), TritonOps(*how, caches[1])]

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device).to(dtype)

    x, delta, weight = draw(TOKENS, 1000), draw(TOKENS, 1000), draw(1000)
    gate_up, qkv = draw(TOKENS, 2 * 3000), draw(TOKENS, (query + 2 * kv) * dim)
    scales = (draw(dim), draw(dim)) if norms else (None, None)
    positions = torch.arange(TOKENS, device=device) * 3
    slots = torch.randperm(9 * PAGE)[:TOKENS].to(device)
    found = []
    for one in ops:
        one.begin(positions, slots)
        sums = x.clone()
        normed = one.add_norm(sums, delta, weight)
        found.append(
            [one.norm(x, weight), sums, normed, one.gate(gate_up), *one.heads(1, qkv.clone(), *scales)]
        )
    error = 1e-4 if dtype is torch.float32 else 4e-2
    for expected, got in zip((*found[0], caches[0]), (*found[1], caches[1]), strict=True):
        torch.testing.assert_close(got, expected, atol=error, rtol=error)


@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (1000, 14336), (3, 100), (128256, 2048)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_single_row_is_multiplied_as_by_torch(outputs, inputs, biased, device):
    if device != "cuda":
        pytest.skip("a kernel for CUDA")
    pytest.importorskip("triton")
    from engine.ops.cuda.ops import multiply_row

    torch.manual_seed(0)
    x, weight = (torch.randn(rows, inputs, device=device).bfloat16() for rows in (1, outputs))
    bias = torch.randn(outputs, device=device).bfloat16() if biased else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    error = (multiply_row(x, weight, bias).double() - exact).abs().max() / exact.abs().max()
    assert float(error) < 1e-2
