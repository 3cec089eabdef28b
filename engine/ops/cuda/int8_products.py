"""int8 products by kernels for CUDA. Importing it needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from engine.ops.cuda import products as kernels
from engine.ops.cuda.ops import is_hopper

# Results are those of CPUs to the last bit: no multiplication is fused with an addition.
OPTIONS = {"enable_fp_fusion": False}
ROW_SIZES = {"ROWS": 2, "COLUMNS": 512, "num_warps": 4}
MULTIPLE = 16  # of inputs: rows of codes begin at multiples of what a thread loads at once


def quantize_sizes(width: int) -> dict[str, int]:
    block = min(8192, int(triton.next_power_of_2(width)))
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def tile_sizes(rows: int, *, hopper: bool) -> dict[str, int]:
    """Sizes for multiply_int8, by the rows of x."""
    if rows <= 16:
        return {"ROWS": 16, "OUTPUTS": 32, "INPUTS": 256, "num_warps": 4, "num_stages": 4}
    if rows <= 64:
        return {"ROWS": 64, "OUTPUTS": 32, "INPUTS": 128, "num_warps": 4, "num_stages": 4}
    if rows <= 128:
        return {"ROWS": 128, "OUTPUTS": 64, "INPUTS": 128, "num_warps": 4, "num_stages": 4}
    if hopper:
        return {"ROWS": 128, "OUTPUTS": 256, "INPUTS": 128, "num_warps": 8, "num_stages": 3}
    return {"ROWS": 128, "OUTPUTS": 128, "INPUTS": 128, "num_warps": 8, "num_stages": 3}


def quantize(x: Tensor, inputs: int, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[rows, width] → int8 [rows, inputs], padded with zeros, and float32 scales [rows]. `largest`: float32 [rows], each
    row's largest absolute value, where it is not that of x."""
    rows, width = x.shape
    x = x.contiguous()
    codes = torch.empty(rows, inputs, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    kernels.quantize_rows[(rows,)](
        x, scales if largest is None else largest, codes, scales, width, inputs, GIVEN=largest is not None,
        **quantize_sizes(inputs), **OPTIONS,
    )  # fmt: skip
    return codes, scales


def multiply(
    codes: Tensor, of_rows: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """out [rows, outputs] = int8 codes [rows, inputs] times weight [outputs, inputs] transposed, scaled, plus bias."""
    rows, (outputs, inputs) = len(codes), weight.shape
    added = scales if bias is None else bias
    if rows == 1:
        kernels.multiply_row_int8[(triton.cdiv(outputs, ROW_SIZES["ROWS"]),)](
            codes.view(torch.int32), of_rows, weight.view(torch.int32), scales, added, out, outputs, inputs // 4,
            BIASED=bias is not None, **ROW_SIZES, **OPTIONS,
        )  # fmt: skip
        return
    sizes: dict[str, Any] = tile_sizes(rows, hopper=is_hopper(codes.device))
    grid = (triton.cdiv(rows, sizes["ROWS"]) * triton.cdiv(outputs, sizes["OUTPUTS"]),)
    kernels.multiply_int8[grid](
        codes, of_rows, weight, scales, added, out, rows, outputs, inputs,
        BIASED=bias is not None, WHOLE=inputs % sizes["INPUTS"] == 0, **sizes, **OPTIONS,
    )  # fmt: skip
