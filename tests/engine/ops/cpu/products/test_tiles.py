"""Products with bf16 weights, by AMX where this CPU has it: exact enough, bitwise the same whatever rows are beside,
within their memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.layers.linear import PanelLinear
from engine.ops.cpu import jobs
from engine.ops.cpu.codegen import tile_registers
from engine.ops.cpu.products import bf16, tiles
from engine.ops.cpu.team import KernelTeam
from tests.engine.ops.cpu.products.guarded_memory import guarded, numbers

needs_amx = pytest.mark.skipif(not tile_registers.supported(), reason="this CPU has no AMX")
# One slice and one panel; outputs that do not fill panels; several slices, not of one length; blocks of one tile.
SHAPES: list[tuple[int, int]] = [(32, 32), (64, 75), (1056, 40), (576, 5), (8192, 33)]


def linear(inputs: int, outputs: int, threads: int = 1, bias: bool = True) -> tuple[PanelLinear, Tensor]:
    """A layer, and its matrix with the bias as last column."""
    weight, added = numbers(outputs, inputs), numbers(outputs, seed=1) if bias else None
    made = PanelLinear(weight, added, KernelTeam(threads, torch.bfloat16, 8))
    last = torch.zeros(outputs) if added is None else added
    return made, torch.cat([weight, last.to(torch.bfloat16)[:, None]], 1).double()


@needs_amx
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_whatever_rows_are_beside_it(shape, bias):
    """Alone, and among up to 700: registers of fewer rows, whole tiles, several blocks."""
    made, matrix = linear(shape[0], shape[1], bias=bias)
    assert made._code == jobs.MULTIPLY_TILES
    x = numbers(700, shape[0], seed=2)
    alone = torch.cat([made(x[row : row + 1]) for row in range(100)])
    exact = torch.cat([x[:100], torch.ones(100, 1)], 1).double() @ matrix.T
    torch.testing.assert_close(alone.double(), exact, atol=4e-2, rtol=8e-3)
    for rows in (0, 2, 5, 15, 16, 17, 31, 32, 33, 48, 49, 65, 700):
        assert torch.equal(made(x[:rows])[:100], alone[:rows]), rows
    assert torch.equal(made(x[37:90]), alone[37:90])


@pytest.mark.parametrize("threads", [2, 3])
def test_shares_of_threads_give_the_same_bits(threads):
    """A share begins and ends anywhere in a block."""
    x = numbers(100, 8192, seed=2)
    expected = linear(8192, 150)[0](x)
    assert torch.equal(linear(8192, 150, threads)[0](x), expected)
    assert torch.equal(linear(8192, 150, threads)[0](x[:7]), expected[:7])


@pytest.mark.parametrize("rows", [1, 3, 16, 20, 32, 33, 50])
def test_nothing_is_read_or_written_beyond_the_rows(rows):
    """A product that does ends the process."""
    made, _ = linear(64, 75)
    x, _x_memory = guarded((rows, 64), True)
    out, _out_memory = guarded((rows, 75), False)
    made.team.run(*made._job(rows, x.data_ptr(), out.data_ptr()))
    assert torch.equal(out, made(x.clone()))


def test_columns_beyond_the_matrix_are_not_written():
    made, matrix = linear(64, 75)
    x, out = numbers(40, 64, seed=2), torch.full((42, 75), 7.0, dtype=torch.bfloat16)
    made.team.run(*made._job(40, x.data_ptr(), out[1:].data_ptr()))
    exact = torch.cat([x, torch.ones(40, 1)], 1).double() @ matrix.T
    torch.testing.assert_close(out[1:41].double(), exact, atol=4e-2, rtol=8e-3)
    assert (out[0] == 7).all() and (out[41] == 7).all()


def test_rows_of_which_one_is_not_finite_leave_the_others_alone():
    made, _ = linear(64, 75)
    x = numbers(50, 64, seed=2)
    expected = made(x)
    x[20, 3] = torch.nan
    out = made(x)
    assert out[20].isnan().all()
    assert torch.equal(out[:20], expected[:20]) and torch.equal(out[21:], expected[21:])


@pytest.mark.parametrize("inputs", [96, 34, 8192])
def test_without_amx_panels_are_multiplied_by_other_instructions(inputs, monkeypatch):
    """Also where a step of AMX would not be full, and where Linux does not give a process the registers; long rows, of
    which few are computed together."""
    if inputs != 34:
        monkeypatch.setattr(tiles, "supported", lambda: False)
    made, matrix = linear(inputs, 75)
    by_instruction = bf16.has_instruction()
    assert made._code == (jobs.MULTIPLY if by_instruction else jobs.MULTIPLY_WIDE)
    x = numbers(40, inputs, seed=2)
    alone = torch.cat([made(x[row : row + 1]) for row in range(40)])
    exact = torch.cat([x, torch.ones(40, 1)], 1).double() @ matrix.T
    torch.testing.assert_close(alone.double(), exact, atol=4e-2, rtol=8e-3)
    assert torch.equal(made(x), alone)


def test_blocks_fit_the_second_level_cache_and_have_a_tile_at_least():
    assert [tiles.blocks(rows, 1024) for rows in (1, 32, 384, 385, 2048)] == [1, 1, 1, 2, 6]
    assert [tiles.blocks(rows, 16384) for rows in (1, 33, 2048)] == [1, 2, 64]
