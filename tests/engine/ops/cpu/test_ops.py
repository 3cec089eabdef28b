"""The CPU's kernels do what torch's operations do, in both dtypes, on one thread and on two."""

from __future__ import annotations

import math
import sys
from functools import cache, partial
from typing import Any

import pytest
import torch
from numba import cfunc, types
from torch import Tensor

from engine.layers.linear import PanelLinear, RowLinear
from engine.model.rotary import tables
from engine.ops.base import LayerOps, OpsShape
from engine.ops.cpu.codegen.llvm import integers
from engine.ops.cpu.jobs import ADD_NORM, DONE, EMBED, GATE, MULTIPLY, MULTIPLY_WIDE
from engine.ops.cpu.ops import CpuOps
from engine.ops.cpu.products import bf16, tiles
from engine.ops.cpu.team import KernelTeam, bits_of
from engine.ops.torch_ops import ACTIVATIONS, TorchOps

HEADS, KV, DIM, PAGE, LAYERS, BLOCKS = 6, 2, 16, 16, 3, 12
TOKENS, WIDTH = 70, 96  # enough rows to be shared
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def make(kind: str, dtype: torch.dtype, threads: int, activation: str = "silu") -> tuple[LayerOps, Tensor]:
    """The last layer rotates by a table of its own."""
    cache = torch.zeros(BLOCKS, LAYERS, 2, KV, PAGE, DIM, dtype=dtype)
    shape = OpsShape(HEADS, KV, DIM, 1e-5, activation, (0, 0, 1), 1.702, 7.0)
    angles = [tables(1.0 / base ** (torch.arange(0, DIM, 2) / DIM), 256) for base in (100.0, 7.0)]
    cos, sin = (torch.stack(one) for one in zip(*angles, strict=True))
    ops = (
        TorchOps(shape, cos, sin, cache)
        if kind == "torch"
        else CpuOps(shape, cos, sin, cache, KernelTeam(threads, dtype, DIM))
    )
    ops.begin(torch.arange(100, 100 + TOKENS), torch.randperm(BLOCKS * PAGE, generator=seeded())[:TOKENS])
    return ops, cache


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=seeded()).to(dtype)


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "clamped_swiglu"])
def test_kernels_equal_torch(dtype, threads, activation):
    outputs = []
    for kind in ("torch", "cpu"):
        ops, cache = make(kind, dtype, threads, activation)
        x, weight = random(TOKENS, WIDTH, dtype=dtype), random(WIDTH, dtype=dtype)
        gate = random(TOKENS, 2 * WIDTH, dtype=dtype) * 20
        qkv = random(TOKENS, (HEADS + 2 * KV) * DIM, dtype=dtype)
        norm = random(DIM, dtype=dtype)
        first = ops.norm(x, weight)
        second = ops.add_norm(x, random(TOKENS, WIDTH, dtype=dtype) / 3, weight)
        plain = ops.heads(1, qkv.clone(), None, None)
        normed = ops.heads(2, qkv.clone(), norm, norm)
        outputs.append([first, second, x, ops.gate(gate), *plain, *normed, cache])
    # torch's 1 + tanh has few digits left where gelu is almost 0
    atol = 10 * CLOSE[dtype] if activation == "gelu_tanh" and dtype is torch.float32 else CLOSE[dtype]
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=CLOSE[dtype])
    assert outputs[0][-1].count_nonzero() > 0 and outputs[0][-1][:, 0].count_nonzero() == 0


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "clamped_swiglu"])
def test_no_gate_hides_a_nan(dtype, activation):
    ops, _ = make("cpu", dtype, 1, activation)
    gate_up = random(TOKENS, 2 * WIDTH, dtype=dtype)
    gate_up[0, 3] = gate_up[1, WIDTH + 5] = math.nan
    found = ops.gate(gate_up).isnan()
    assert found.nonzero().tolist() == [[0, 3], [1, 5]]


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_in_a_kernel_is_raised(threads, monkeypatch):
    """numba gives it to `sys.unraisablehook`, which writes it to stderr, and the kernel's caller goes on."""
    written: list[type] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: written.append(one.exc_type))
    team, kernel = KernelTeam(threads, torch.float32, DIM), raising()
    team._kernels[GATE] = kernel.address
    jobs = [(GATE, items, (at,)) for at, items in ((0, 1), (1, 9), (0, 1))]
    for _ in range(2):
        for attempt in (partial(team.run, *jobs[1]), partial(team.run_all, team.compile(jobs))):
            with pytest.raises(RuntimeError, match="a CPU kernel raised an error"):
                attempt()
        team.run(*jobs[0])  # what follows is computed
        team.run_all(team.compile([jobs[0]] * 2))
    assert set(written) == {MemoryError}


@cache
def raising() -> Any:
    """A kernel that raises if its first argument is not 0."""

    def kernel(job, first, last):
        if integers(job)[0]:
            raise MemoryError
        return DONE

    return cfunc(types.int64(types.int64, types.int64, types.int64))(kernel)


@pytest.mark.parametrize("kind", ["torch", "cpu"])
def test_norms_by_fp32_weights_round_once(kind):
    """Gemma's 1 + w; a weight in bf16 would be off by 2⁻⁸ more."""
    ops, _ = make(kind, torch.bfloat16, 1)
    x, weight = (
        random(TOKENS, WIDTH, dtype=torch.bfloat16),
        1.0 + random(WIDTH, dtype=torch.float32).abs() / 4,
    )
    head = weight[:DIM].contiguous()
    close = partial(torch.testing.assert_close, atol=1e-6, rtol=2.05 * 2**-9)

    def normed(rows: Tensor, by: Tensor) -> Tensor:
        rows = rows.double()
        return rows * (rows.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * by

    delta = random(TOKENS, WIDTH, dtype=torch.bfloat16) / 3
    close(ops.norm(x, weight).double(), normed(x, weight))
    added = ops.add_norm(x, delta, weight)
    close(added.double(), normed(x, weight))
    qkv = random(TOKENS, (HEADS + 2 * KV) * DIM, dtype=torch.bfloat16)
    heads = qkv.view(TOKENS, -1, DIM)[:, : HEADS + KV].clone()
    ops.begin(torch.zeros(TOKENS, dtype=torch.int64), torch.arange(TOKENS))  # position 0: nothing is rotated
    q, k, _ = ops.heads(1, qkv, head, head)
    close(torch.cat((q, k), 1).double(), normed(heads, head))


@pytest.mark.parametrize("of_weight", list(CLOSE))
def test_a_norm_in_place_gives_the_same_bits(of_weight):
    """As in lists of jobs; it runs another form of the loop."""
    rows, team = 20_000, KernelTeam(1, torch.bfloat16, DIM)  # one number in 200,000 may lie between two
    x, weight = (
        random(rows, WIDTH, dtype=torch.bfloat16),
        (1.0 + random(WIDTH, dtype=torch.float32) / 4).to(of_weight),
    )
    out, in_place, wide = torch.empty_like(x), x.clone(), int(of_weight is torch.float32)
    for source, target in ((x, out), (in_place, in_place)):
        at = (source.data_ptr(), 0, weight.data_ptr(), target.data_ptr(), WIDTH, bits_of(1e-5), wide)
        team.run(ADD_NORM, rows, at)
    assert torch.equal(out, in_place)


def test_a_process_has_kernels_of_both_dtypes():
    """The two kinds, 0 and 0.0, are equal in Python."""
    for dtype in CLOSE:
        gate = random(2, 2 * WIDTH, dtype=dtype)
        ops, plain = (make(kind, dtype, 1)[0] for kind in ("cpu", "torch"))
        torch.testing.assert_close(ops.gate(gate), plain.gate(gate), atol=CLOSE[dtype], rtol=CLOSE[dtype])


def test_layers_rotate_by_their_own_table():
    ops, _ = make("cpu", torch.float32, 1)
    qkv = random(TOKENS, (HEADS + 2 * KV) * DIM, dtype=torch.float32)
    first, second, third = (ops.heads(layer, qkv.clone(), None, None)[0].clone() for layer in range(LAYERS))
    assert torch.equal(first, second) and not torch.allclose(second, third)


@pytest.mark.parametrize(("activation", "atol"), [("silu", 1e-30), ("gelu_tanh", 1e-7)])
def test_the_gate_survives_extreme_values(activation, atol):
    ops, _ = make("cpu", torch.float32, 1, activation)
    gate = torch.tensor([[-1e4, -90.0, -1e-8, 0.0, 1e-8, 90.0, 1e4, -3.0] + [1.0] * 8])
    expected = ACTIVATIONS[activation](gate[:, :8])
    torch.testing.assert_close(ops.gate(gate), expected, atol=atol, rtol=1e-6)


@pytest.mark.parametrize("dtype", list(CLOSE))
def test_rows_are_read_and_scaled(dtype):
    """As torch scales them: one rounding, in the rows' dtype."""
    table, rows = random(20, WIDTH, dtype=dtype), torch.tensor([3, 0, 19, 3])
    out, team = torch.empty(4, WIDTH, dtype=dtype), KernelTeam(1, dtype, DIM)
    for scale in (1.0, 8.0, float(torch.tensor(96**0.5).to(dtype)), 1 / 0.22):
        where = (table.data_ptr(), rows.data_ptr(), out.data_ptr(), WIDTH, bits_of(scale))
        team.run(EMBED, 4, where)
        torch.testing.assert_close(out, table[rows] * scale, atol=0, rtol=0 if scale != 1 / 0.22 else 1e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        pytest.param(
            MULTIPLY,
            torch.bfloat16,
            marks=pytest.mark.skipif(not bf16.has_instruction(), reason="this CPU has no AVX512-BF16"),
        ),
        (MULTIPLY_WIDE, torch.bfloat16),
        (MULTIPLY_WIDE, torch.float32),
    ],
)
def test_products_by_panels(threads, code, dtype, monkeypatch):
    """Every size of a tile, several of them, and outputs that do not fill a panel."""
    monkeypatch.setattr(tiles, "takes", lambda inputs: False)
    monkeypatch.setattr(bf16, "has_instruction", lambda: code == MULTIPLY or dtype is torch.float32)
    team = KernelTeam(threads, dtype, DIM)
    weight, bias = random(75, WIDTH, dtype=dtype), random(75, dtype=dtype)
    linear, plain = PanelLinear(weight, bias, team), PanelLinear(weight, None, team)
    assert linear._code == code
    x = random(40, WIDTH, dtype=dtype)
    exact = x.double() @ weight.double().T
    atol, rtol = (1e-3, 8e-3) if dtype is torch.bfloat16 else (1e-5, 1e-5)
    for rows in (*range(1, 14), 40):
        torch.testing.assert_close(linear(x[:rows]).double(), exact[:rows] + bias, atol=atol, rtol=rtol)
    alone = torch.cat([plain(x[row : row + 1]) for row in range(40)])
    torch.testing.assert_close(plain(x), alone, atol=0, rtol=0)  # whatever rows are beside it


@pytest.mark.parametrize("threads", [1, 2])
def test_products_by_a_matrix_as_it_is(threads):
    """Every size of a tile, and outputs that fill neither tiles nor items; nothing is written beside them."""
    team = KernelTeam(threads, torch.float32, DIM)
    weight, bias = random(75, WIDTH, dtype=torch.float32), random(75, dtype=torch.float32)
    linear = RowLinear(weight, bias, team)
    assert linear._weight is weight
    x = random(8, WIDTH, dtype=torch.float32)
    exact = x.double() @ weight.double().T + bias
    alone = torch.cat([linear(x[row : row + 1]) for row in range(8)])
    for rows in range(9):
        out = torch.full((rows + 2, 75), 7.0)
        team.run(*linear.jobs(rows, x.data_ptr(), out[1:].data_ptr())[0])
        torch.testing.assert_close(out[1:-1].double(), exact[:rows], atol=1e-5, rtol=1e-5)
        assert torch.equal(out[1:-1], alone[:rows]) and (out[[0, -1]] == 7.0).all()
