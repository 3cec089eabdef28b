"""The small kernels against torch's operations. Run by test_interpreted.py, where Triton interprets kernels."""

from __future__ import annotations

import math

import pytest
import torch

from engine import kv_blocks
from engine.attention import triton_kernels as attention_kernels
from engine.attention.base import AttentionShape
from engine.attention.triton_backend import TritonBackend
from engine.layers.linear import CudaLinear
from engine.ops.base import OpsShape
from engine.ops.cuda import kernels
from engine.ops.cuda.conversion import write_part
from engine.ops.cuda.ops import TritonOps, multiply_row
from engine.ops.torch_ops import TorchOps
from engine.plan import PlanItem
from tests.engine.steps import buffers_of

DTYPES = [torch.float32, torch.bfloat16]


def both(heads: int, kv: int, dim: int, page: int, dtype: torch.dtype, activation: str = "silu"):
    """Both layers rotate by tables of their own."""
    shape = OpsShape(heads, kv, dim, 1e-5, activation, (0, 1), 1.702, 2.5)
    angles = torch.rand(2, 100, dim // 2) * 6
    caches = [torch.full((9, 2, 2, kv, page, dim), math.nan, dtype=dtype) for _ in range(2)]
    made = (TorchOps, TritonOps)
    return [
        one(shape, angles.cos(), angles.sin(), cache) for one, cache in zip(made, caches, strict=True)
    ], caches


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype is expected.dtype
    error = 1e-5 if got.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, atol=error, rtol=error, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "of_weight"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize("width", [64, 100])
def test_norms_are_those_of_torch_and_a_sum_is_written_in_place(width, dtype, of_weight):
    torch.manual_seed(0)
    (plain, own), _ = both(2, 1, 16, 16, dtype)
    x, delta = (torch.randn(3, width).to(dtype) for _ in range(2))
    weight = torch.randn(width).to(of_weight)
    before = x.clone()
    close(own.norm(x, weight), plain.norm(x, weight))
    assert torch.equal(x, before)
    other = x.clone()
    close(own.add_norm(x, delta, weight), plain.add_norm(other, delta, weight))
    close(x, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_the_gate_is_that_of_torch_and_keeps_nan(dtype, activation):
    torch.manual_seed(0)
    (plain, own), _ = both(2, 1, 16, 16, dtype, activation)
    gate_up = 3 * torch.randn(3, 2 * 1100).to(dtype)
    gate_up[0, 7] = gate_up[1, 1100 + 7] = math.nan
    close(own.gate(gate_up), plain.gate(gate_up))


@pytest.mark.parametrize("norms", ["", "as the rows", "fp32"])
@pytest.mark.parametrize(
    ("heads", "kv", "dim", "page", "dtype"),
    [(4, 2, 64, 16, torch.float32), (3, 1, 40, 4, torch.float32), (2, 2, 128, 16, torch.bfloat16)],
    ids=str,
)
def test_heads_are_normed_rotated_and_written(heads, kv, dim, page, dtype, norms):
    torch.manual_seed(0)
    parts, caches = both(heads, kv, dim, page, dtype)
    slots = torch.tensor([8 * page + page - 1, 0, 3 * page + 1])
    qkv = torch.randn(3, (heads + 2 * kv) * dim).to(dtype)
    of_weights = torch.float32 if norms == "fp32" else dtype
    weights = [torch.rand(dim).to(of_weights) + 0.5 for _ in range(2)] if norms else [None, None]
    found = []
    for ops in parts:
        ops.begin(torch.tensor([0, 99, 7]), slots)
        found.append(ops.heads(1, qkv.clone(), *weights))
    for expected, got in zip(*found, strict=True):
        close(got, expected)
    close(caches[1], caches[0])
    assert caches[1].isnan().any(), "other slots are as they were"


@pytest.mark.parametrize(
    ("heads", "kv", "dim", "page", "dtype", "norms"),
    [(4, 2, 64, 16, torch.float32, False), (3, 1, 40, 8, torch.bfloat16, True)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of the row that is not finite
def test_rows_are_rounded_as_on_cpus(heads, kv, dim, page, dtype, norms):
    """To the last bit, from the numbers that a cache of this dtype would have; and given back as they are read."""
    torch.manual_seed(0)
    slots = torch.randperm(9 * page)[:6]
    qkv = torch.randn(6, (heads + 2 * kv) * dim) * torch.logspace(-15, 15, 6)[:, None]
    qkv[1] = 0.0
    qkv[2, -1] = math.inf
    qkv[3] = (torch.arange(dim) - 62.5).repeat(heads + 2 * kv)  # half way between codes
    qkv[3, ::dim] = 127.0
    qkv = qkv.to(dtype)
    weights = [torch.rand(dim).to(dtype) + 0.5 for _ in range(2)] if norms else [None, None]
    exact = torch.zeros(9, 2, 2, kv, page, dim, dtype=dtype)
    codes = torch.full((9, 2, 2, kv, page, dim + 2), 7, dtype=torch.int8)
    found = []
    for cache in (exact, codes):
        angles = torch.rand(1, 100, dim // 2, generator=torch.Generator().manual_seed(1)) * 6
        ops = TritonOps(OpsShape(heads, kv, dim, 1e-5, dtype=dtype), angles.cos(), angles.sin(), cache)
        ops.begin(torch.tensor([5, 1, 2, 0, 4, 3]), slots)
        found.append(ops.heads(1, qkv.clone(), *weights))
    assert torch.equal(found[0][0], found[1][0]), "queries"
    written = exact[slots // page, 1, :, :, slots % page]  # [token, K|V, head, dim]
    own = [plane[slots // page, 1, :, :, slots % page] for plane in kv_blocks.split(codes)]
    finite = written.isfinite().all(-1)
    assert int((~finite).sum()) == 1 and bool(own[1][~finite].isnan().all())
    expected = kv_blocks.quantize(written)
    assert all(torch.equal(got[finite], one[finite]) for got, one in zip(own, expected, strict=True))
    given = torch.stack(found[1][1:], 1)
    close(given[finite], kv_blocks.dequantize(own[0], own[1], dtype)[finite])
    untouched = torch.ones(9 * page, dtype=torch.bool)
    untouched[slots] = False
    left = kv_blocks.split(codes)[0].permute(0, 4, 1, 2, 3, 5).reshape(9 * page, -1)
    assert bool((left[untouched] == 7).all()) and bool((codes[:, 0] == 7).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_part_is_converted_as_on_cpus(dtype):
    """Of some layers and heads, cut at both ends, in blocks longer than what a program converts."""
    torch.manual_seed(0)
    page, dim, tokens, offset = 24, 40, 27, 22
    numbers = torch.randn(tokens * 2 * 2, dim) * torch.logspace(-15, 15, tokens * 4)[:, None]
    numbers[3], numbers[5] = 0.0, torch.arange(dim) - 5.5
    numbers[5, 0] = 127.0  # half way between codes
    found = []
    for write in (kv_blocks.write_part, write_part):
        cache = torch.full((9, 3, 2, 4, page, dim + 2), 7, dtype=torch.int8)
        write(cache[:, 1:2, :, 2:4], numbers.to(dtype).flatten(), torch.tensor([8, 0, 3]), offset)
        found.append(cache)
    assert torch.equal(*found)


@pytest.mark.parametrize(("outputs", "inputs"), [(7, 40), (5, 1024), (3, 2500)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_single_row_is_multiplied(outputs, inputs, biased, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(1, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias = 10 * torch.randn(outputs).to(dtype) if biased else None
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    close(multiply_row(x, weight, bias).double(), expected)


def test_more_rows_are_torchs_and_one_is_ours():
    layer = CudaLinear(torch.randn(9, 24), torch.randn(9))
    x = torch.randn(3, 24)
    close(torch.cat([layer(row) for row in x.split(1)]), layer(x))


def test_launches_of_a_decode_step(monkeypatch):
    """Beside a layer's four products: five of our own, so that a layer is nine."""
    launched: list[str] = []
    for module, names in (
        (kernels, ("norm_rows", "gate_rows", "rotate_heads")),
        (attention_kernels, ("attend_prompts", "attend_tokens")),
    ):
        for name in names:
            one = {"name": name}
            count = type(
                "Count",
                (),
                {"__getitem__": lambda self, grid, one=one: lambda *a, **k: launched.append(one["name"])},
            )
            monkeypatch.setattr(module, name, count())
    (_, ops), (cache, _) = both(4, 2, 16, 16, torch.float32)
    backend = TritonBackend(AttentionShape(4, 2, 16, 16, (0, 0)), cache)
    step = buffers_of([PlanItem(str(row), [0], 20, [row, row + 4], row, 1) for row in range(3)], 16)
    ops.begin(step.positions, step.slots)
    backend.begin(step)
    x, weight = torch.zeros(3, 64), torch.zeros(64)
    q, k, v = ops.heads(0, torch.zeros(3, 8 * 16), None, None)
    ops.add_norm(x, backend.attend(0, q, k, v), weight)
    ops.add_norm(x, ops.gate(torch.zeros(3, 128)), weight)
    assert launched == [
        "rotate_heads",
        "attend_tokens",
        "norm_rows",
        "gate_rows",
        "norm_rows",
    ]
