"""Products with weights in FP8 or small integers by kernels for CUDA. Importing it needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from engine.ops.codes import BYTES, FP8, NIBBLES, CodedWeight
from engine.ops.cuda import products as kernels
from engine.ops.cuda.ops import OPTIONS

KINDS = {FP8: kernels.FP8.value, BYTES: kernels.BYTES.value, NIBBLES: kernels.NIBBLES.value}
MAX_ROWS = 128  # above, expanding the weights costs less than converting them in each tile of rows
EXPANDED = 1 << 26  # weights that are expanded at a time, which bounds the memory of a product
EXPAND_BLOCK = 1024
ROW_INPUTS = 1024  # of a single row that a program multiplies at a time
_LONGEST = 128  # inputs of one group that are multiplied at a time


def inputs_together(group: int) -> int:
    """The largest power of two that divides a group, which is a multiple of 32."""
    return min(_LONGEST, group & -group) if group else _LONGEST


def row_sizes(kind: str, group: int) -> dict[str, int]:
    """Sizes for multiply_row_codes: the fastest of 20 measured on an H100 at the 8B shape of Llama."""
    columns = inputs_together(group) if group else ROW_INPUTS
    rows = 1 if kind == NIBBLES else 4
    return {"ROWS": rows, "TILES": ROW_INPUTS // columns, "COLUMNS": columns, "num_warps": 2}


def tile_sizes(rows: int, group: int) -> dict[str, int]:
    """Sizes for multiply_codes, by the rows of x."""
    together = inputs_together(group)
    if rows <= 16:
        return {"ROWS": 16, "OUTPUTS": 32, "INPUTS": together, "num_warps": 4, "num_stages": 5}
    if rows <= 64:
        return {"ROWS": 64, "OUTPUTS": 32, "INPUTS": together, "num_warps": 4, "num_stages": 3}
    return {"ROWS": 128, "OUTPUTS": 64, "INPUTS": min(64, together), "num_warps": 8, "num_stages": 3}


def form(weight: CodedWeight) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the tensors and constants of a weight that all kernels take."""
    zeros = weight.codes if weight.zeros is None else weight.zeros
    return (weight.codes, weight.scales, zeros), {"KIND": KINDS[weight.kind]}


def multiply(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    """x [rows, inputs], of at most MAX_ROWS, times the weight transposed, plus bias [outputs]."""
    rows, (outputs, inputs) = len(x), weight.shape
    x = x.contiguous()
    out = x.new_empty(rows, outputs)
    tensors, constants = form(weight)
    added = x if bias is None else bias
    groups, stride = weight.scales.shape[1], weight.codes.shape[1]
    constants |= {"GROUP": weight.group, "BIASED": bias is not None, **OPTIONS}
    if rows == 1:
        sizes = row_sizes(weight.kind, weight.group)
        kernels.multiply_row_codes[(triton.cdiv(outputs, sizes["ROWS"]),)](
            x, *tensors, added, out, outputs, stride, groups, **sizes, **constants
        )
        return out
    sizes = tile_sizes(rows, weight.group)
    grid = (triton.cdiv(rows, sizes["ROWS"]) * triton.cdiv(outputs, sizes["OUTPUTS"]),)
    kernels.multiply_codes[grid](
        x, *tensors, added, out, rows, outputs, stride, groups,
        WHOLE=inputs % sizes["INPUTS"] == 0, **sizes, **constants,
    )  # fmt: skip
    return out


def expand(weight: CodedWeight, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Outputs [begin, end) of the matrix in `dtype`."""
    _, inputs = weight.shape
    stride, groups = weight.codes.shape[1], weight.scales.shape[1]
    out = torch.empty(end - begin, inputs, dtype=dtype, device=weight.codes.device)
    tensors, constants = form(weight)
    kernels.expand_codes[(end - begin, triton.cdiv(stride, EXPAND_BLOCK))](
        *(one[begin:end] for one in tensors), out, stride, groups, weight.group or inputs,
        BLOCK=EXPAND_BLOCK, num_warps=4, **constants, **OPTIONS,
    )  # fmt: skip
    return out


def multiply_expanded(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    """As `multiply`, for any number of rows: outputs are expanded a part at a time."""
    outputs, inputs = weight.shape
    out = x.new_empty(len(x), outputs)
    together = max(16, EXPANDED // inputs // 16 * 16)
    for begin in range(0, outputs, together):
        end = min(begin + together, outputs)
        torch.mm(x, expand(weight, begin, end, x.dtype).t(), out=out[:, begin:end])
    return out if bias is None else out.add_(bias)
